"""The ServerApp: opens the run's folder and drives the curriculum over a grid of any engine."""

from collections.abc import Callable
from logging import INFO, WARNING, getLogger
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import perennial
from perennial.config.experiment import Experiment
from perennial.config.run import CohortPlan, RunSettings
from perennial.foundation import plugins
from perennial.foundation.files import DiskWrites, hold_folder
from perennial.foundation.heartbeat import keep_beating
from perennial.foundation.names import NODES
from perennial.learning.batches import TrainingSet
from perennial.learning.device import choose_device, use_products_of
from perennial.learning.steps import prepare_gpu
from perennial.server.checkpoint import CheckpointWriter, load_checkpoint
from perennial.server.control import ALIVE, PAUSES, pause_in_words
from perennial.server.curriculum import Curriculum
from perennial.server.evaluation import CentralEvaluation
from perennial.server.journal import Journal
from perennial.server.live_status import ParcelGrid
from perennial.server.position import Position
from perennial.server.preflight import run_preflight
from perennial.server.run_folder import open_run_folder
from perennial.server.summary import write_results


def run_to_the_end(
    grid: Grid,
    experiment: Experiment,
    settings: RunSettings,
    path: Path,
    engine: str,
    listener: Callable[[dict[str, Any]], None] | None,
    cohort: CohortPlan,
    prepare: Callable[[Path], None] | None,
) -> dict[str, Any]:
    """Check everything that can be checked before anything starts, then drive the curriculum to its end.

    path: the run's folder. Writes model, summary, metrics and report; returns the summary. engine:
    in-process, ray or grpc. prepare: as serve() has it. Raises a PerennialError that says what is wrong.
    """
    device = choose_device(settings.device if engine == "in-process" else "cpu")
    prepare_gpu(settings.gpu, device)
    use_products_of(experiment.learner)
    checked = run_preflight(experiment, device)
    facts, model, strategy = checked.facts, checked.model, checked.strategy
    folder = open_run_folder(
        path, experiment, facts.registry, facts.inputs, bool(settings.resume), cohort.size
    )
    if prepare is not None:
        prepare(path)
        if folder.checkpoint is not None:
            folder.checkpoint, _ = load_checkpoint(folder.checkpoint_folder)
    position = folder.checkpoint.progress.journal_position if folder.checkpoint else 0
    journal = Journal(path, position, listener)
    journal.write(
        "resumed" if folder.checkpoint else "run_started",
        experiment=experiment.name,
        version=perennial.__version__,
        seed=experiment.seed,
        engine=engine,
        device=str(device),
        cohort=cohort.size,
        **({"gpu": settings.gpu} if settings.gpu else {}),
    )
    for note in (folder.note, *facts.notes, cohort.note):
        if note:
            journal.note(note)
    test = measured_on = None
    if facts.test is not None and experiment.evaluation.central:
        data = facts.test
        measured_on = data.fingerprint("test", facts.registry.classes)
        test = TrainingSet(
            data.x[data.test].to(device),
            data.y[data.test].to(device),
            data.mean.to(device),
            data.std.to(device),
            channels_last=experiment.learner.channels_last,
            patients=data.keyed.number_groups(data.test) if data.patients else None,
        )
    registered = path.parents[2] / NODES if engine == "grpc" else None
    if registered is not None and not registered.exists():
        journal.note(f"{registered}: missing, so sites' names are taken as their nodes say them")
        registered = None
    if engine == "grpc":
        grid = ParcelGrid(grid)
    protected = experiment.privacy.enabled or experiment.secure is not None
    # a request is itself a release: it leaves when what it cost is on the disk, unless nothing leaves
    writes = DiskWrites() if engine == "in-process" and not protected else None
    standing = Position.of(experiment, facts.registry, model, folder)
    curriculum = Curriculum(
        grid,
        standing,
        strategy,
        folder,
        journal,
        CentralEvaluation(standing, test),
        CheckpointWriter(
            folder.checkpoint_folder, experiment.model_dump(mode="json"), standing.progress, journal, writes
        ),
        registered,
        waits_for_sites=engine == "grpc",
    )
    try:
        curriculum.run(facts.sites)
        summary = write_results(curriculum, engine, facts.inputs, measured_on)
        curriculum.finish()
        return summary
    finally:
        journal.close()


app = ServerApp()
log = getLogger("flwr").log
ONE_BY_ONE = CohortPlan()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the ServerApp; Flower calls this."""
    name = type(grid).__name__
    engine = "ray" if name == "InMemoryGrid" else "grpc"
    serve(grid, context, engine, listener=log_event)


def log_event(event: dict[str, Any]) -> None:
    """Log one event of the journal as a line that `perennial deploy logs` shows."""
    match event["event"]:
        case "note":
            log(WARNING, event["text"])
        case "round":
            state = "skipped" if event["skipped"] else f"{len(event['participants'])} sites"
            log(INFO, f"task {event['task']} round {event['round']}: {state}, {event['seconds']:.1f} s")
            for found in (*event["dropped"], *event["refused"]):
                log(WARNING, f"{found['site']}: {found['reason']}")
        case "task_finished":
            average = event["average_accuracy"]
            known = "accuracy not measured" if average is None else f"average accuracy {average}"
            log(INFO, f"task {event['task']} learnt: {known}")
        case kind if kind in PAUSES:
            log(WARNING if kind == "paused" else INFO, pause_in_words(event))


def serve(
    grid: Grid,
    context: Context,
    engine: str,
    listener: Callable[[dict[str, Any]], None] | None = None,
    cohort: CohortPlan = ONE_BY_ONE,
    prepare: Callable[[Path], None] | None = None,
) -> dict[str, Any]:
    """Run the experiment that the run config names, to its end; returns the summary.

    engine: in-process, ray or grpc, for the summary. listener: called with every event of the journal.
    cohort: how the grid lets sites train in one pass, for the summary. prepare: changes the held folder, once
    all that may refuse the run has been checked.
    """
    import torch

    from perennial.server.app import run_to_the_end

    settings = RunSettings.from_run_config(context.run_config)
    with plugins.use_also(plugins.parse_names(settings.plugins)):
        experiment = settings.load()
        torch.set_num_threads(settings.threads)
        folder = settings.folder(experiment)
        with hold_folder(folder, f"server of {experiment.name}"), keep_beating(folder / ALIVE):
            return run_to_the_end(grid, experiment, settings, folder, engine, listener, cohort, prepare)
