"""Runs an experiment on this machine: the ServerApp's main over an in-process grid."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from flwr.app import Context, Message, RecordDict

from perennial.config.experiment import Experiment, load_experiment
from perennial.config.run import CohortPlan, RunSettings
from perennial.config.simulation import forget_if_changed, list_simulated_sites, load_simulated_federation
from perennial.engine.cohorts import Asked, Cohorts, plan_cohorts
from perennial.engine.grid import InProcessGrid, Listener, build_site_contexts, set_task_identity
from perennial.foundation.allocator import keep_freed_memory
from perennial.foundation.errors import StateError
from perennial.foundation.files import replace_file

RESUMED = "experiment.resumed.yaml"


def run_in_process(
    settings: RunSettings,
    workers: int = 1,
    listener: Listener | None = None,
    cohort: Asked | None = None,
    tell: Callable[[str], None] | None = None,
) -> dict[str, object]:
    """Run an experiment to the end, or resume it; returns the summary.

    settings.experiment: an absolute path, or one inside the app.
    workers: number of processes over which the sites are spread; the result is the same for any number.
    cohort: sites that train in one pass, which changes the last bits of the result; auto: what suits the
    experiment. None: 1, or as the run that is resumed began.
    tell: hears, in a sentence, what becomes of records that changed since a run that is resumed.
    """
    # what answers a request is imported here: not in the first round, and not once in each worker
    import perennial.client.handlers
    from perennial.server.app import serve

    keep_freed_memory()
    set_task_identity()
    run_config = dict(vars(settings))
    experiment = settings.load()
    forget_if_changed(experiment)
    contexts = build_site_contexts(len(list_simulated_sites(experiment)), run_config)
    plan = _plan(settings, experiment, cohort)
    cohorts = Cohorts(plan.size, answer_cohort) if plan.size > 1 else None
    if cohorts is not None:
        import perennial.client.cohort  # noqa: F401
    if workers > 1:
        grid = _build_worker_grid(settings, experiment, contexts, workers, cohorts)
    else:
        grid = InProcessGrid(answer, contexts, cohorts)

    def prepare(folder: Path) -> None:
        if experiment.has_own_heads:
            from perennial.server.opened_run import forget_own_heads

            forget_own_heads(folder)
        if settings.resume:
            from perennial.engine.growth import update_sums

            if (changed := update_sums(folder, experiment)) and tell is not None:
                tell(changed)

    try:
        context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run_config)
        summary = serve(grid, context, "in-process", listener, plan, prepare)
        if experiment.has_own_heads:
            from perennial.server.opened_run import write_own_heads

            return write_own_heads(settings.folder(experiment))
        return summary
    finally:
        grid.close()


def answer(message: Message, context: Context) -> Message:
    """Answer one message with the ClientApp, under a name that a spawned process can import."""
    from perennial.client.app import app

    return app(message, context)


def answer_cohort(messages: Sequence[Message], contexts: Sequence[Context]) -> list[Message]:
    """Answer the messages of several sites, which train in one pass, with the ClientApp."""
    # here: a run without cohorts does not need it
    from perennial.client.cohort import answer_together

    return answer_together(messages, contexts)


def _plan(settings: RunSettings, experiment: Experiment, asked: Asked | None) -> CohortPlan:
    if asked is None and settings.resume:
        from perennial.server.checkpoint import read_cohort
        from perennial.server.run_folder import CHECKPOINT

        return CohortPlan(read_cohort(settings.folder(experiment) / CHECKPOINT))
    return plan_cohorts(experiment, 1 if asked is None else asked)


def _build_worker_grid(
    settings: RunSettings,
    experiment: Experiment,
    contexts: dict[int, Context],
    workers: int,
    cohorts: Cohorts | None,
) -> InProcessGrid:
    # imported and read before the processes fork, so that they share it
    import torch

    from perennial.engine.workers import WorkerGrid
    from perennial.learning.device import choose_device, list_worker_devices

    torch.set_num_threads(settings.threads)
    load_simulated_federation(experiment)
    method = "spawn" if choose_device(settings.device).type == "cuda" else "fork"
    devices = list_worker_devices(settings.device) if method == "spawn" else []
    return WorkerGrid(answer, contexts, workers, method, cohorts, devices)


def load_resumed_settings(
    experiment: Path | None,
    overrides: list[str],
    seed: int | None,
    folder: Path,
    device: str,
    threads: int = 1,
) -> RunSettings:
    """Settings with which the run in `folder` continues.

    experiment: with overrides and seed, a file that may add classes and tasks; None: the run's own, in which
    data that grew may do so. Raises StateError if the folder holds no run.
    """
    stored = folder / "experiment.yaml"
    if not os.path.exists(stored):
        raise StateError(f"{folder}: no run to resume here (experiment.yaml is missing)")
    folder = folder.resolve()
    source = folder / "experiment.yaml"
    from perennial.server.continuation import Learnt, continue_experiment

    learnt = Learnt.of(folder)
    there = load_experiment(source)
    if experiment is not None:
        new = load_experiment(experiment, overrides, seed)
    elif learnt is not None and not overrides and seed is None:
        # a kill may have left the file of a continuation that had not begun
        new = learnt.experiment
    else:
        new = load_experiment(source, overrides, seed)
    new = continue_experiment(folder, learnt, new)
    if new != there:
        source = folder / RESUMED
        replace_file(source, new.to_yaml().encode(), mode=0o644)
    return RunSettings(
        experiment=str(source),
        name=folder.name,
        runs=str(folder.parent),
        resume="yes",
        device=device,
        threads=threads,
    )
