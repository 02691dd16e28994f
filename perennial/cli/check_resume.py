"""perennial check --resume: what would happen if a run were resumed with its data as they are now."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from perennial.config.experiment import Experiment, load_experiment
from perennial.foundation.errors import StateError

if TYPE_CHECKING:
    from perennial.data.federation import SimulatedFederation
    from perennial.server.continuation import Learnt


def check_resume_command(run: Path, experiment: Path | None) -> None:
    """Print what a run has learnt, what its data add to it, and what it needs of the old data.

    run: its folder. experiment: a file with more classes; None: the run's own. Raises a PerennialError that
    says why the run cannot go on.
    """
    import torch

    from perennial.server.continuation import Learnt, continue_experiment
    from perennial.server.preflight import run_preflight

    stored = run / "experiment.yaml"
    if not stored.exists():
        raise StateError(f"{run}: no run to resume here (experiment.yaml is missing)")
    learnt = Learnt.of(run)
    console = Console(highlight=False, markup=False)

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    if learnt is None:
        say(f"{run}: nothing has begun; it would start over")
        return
    schedule, done = learnt.registry.schedule, learnt.task - 1
    names = learnt.registry.classes[: schedule.boundaries[done]]
    say(f"{run}: has learnt {len(names)} classes in {done} tasks: {', '.join(names) or 'none yet'}")
    new = load_experiment(experiment) if experiment is not None else learnt.experiment
    new = continue_experiment(run, learnt, new)
    checked = run_preflight(new, torch.device("cpu"))
    registry = checked.facts.registry
    if not learnt.finished:
        say(f"it is not finished: a resume goes on with its plan of {schedule.count} tasks")
    for task in range(done + 1, registry.schedule.count + 1):
        classes = ", ".join(registry.classes[label] for label in registry.schedule.list_classes(task))
        say(f"would learn task {task}: {classes} ({registry.schedule.rounds[task - 1]} rounds)")
    if new.data.only_at_sites:
        say("the data are at the sites; each says for itself what it needs of its old data")
    else:
        for line in _of_the_data(run, new, learnt, grows=registry.schedule.count > done):
            say(line)
    for note in checked.facts.notes:
        say(f"note: {note}")
    say("ok")


def _of_the_data(run: Path, experiment: Experiment, learnt: "Learnt", *, grows: bool) -> Iterator[str]:
    """What happened to records of learnt classes in a simulation, and which of them a run would use."""
    from perennial.config.simulation import load_simulated_federation
    from perennial.data.suspicion import inspect_records
    from perennial.engine.growth import describe_learning, describe_unlearnt, find_changes, find_stale_sums
    from perennial.server.opened_run import is_withdrawable

    federation, known = load_simulated_federation(experiment), len(learnt.registry.classes)
    able = learnt.finished and is_withdrawable(run)
    for name in sorted(name for name in federation.sites if able and not (run / "sites" / name).exists()):
        records = len(federation.sites[name].find_task_indices("train", 0, known))
        yield f"site {name!r} is new: it is asked for the sums of its {records} records of earlier tasks too"
    changes = find_changes(run, federation, known)
    yield from changes.in_words()
    for site in federation.sites.values():
        yield from map(str, inspect_records(site, federation.classes))
    fresh = changes.training if changes.learnt else 0
    replays = experiment.strategy.trains and experiment.learner.memory is not None
    if able:
        if told := find_stale_sums(run, experiment, learnt.registry.schedule).in_words(grows):
            yield told
    elif not grows:
        if learnt.finished and (told := describe_unlearnt(changes, experiment)):
            yield told
    elif fresh and replays:
        yield f"{fresh} new records of known classes would be learnt with it, beside the exemplars"
    elif fresh:
        yield f"{fresh} new records of known classes would not be learnt: {describe_learning(experiment)}"
    if not grows and not [*changes.in_words()]:
        yield "there is no new class and no new record: the run is as it would be"
    lacking = [name for name in federation.classes[:known] if not _has_records(federation, name)]
    if lacking:
        yield (
            f"no record is there any more of {', '.join(lacking)}: nothing of them is needed to train, and "
            "they are not measured any more"
        )
    elif grows and replays:
        yield "of the old data the exemplars that sites chose are needed, and test samples to measure them"
    elif grows:
        yield "the old data are needed to measure earlier classes, and not to train"


def _has_records(federation: "SimulatedFederation", name: str) -> bool:
    """Whether any record of a class is there, in whatever part."""
    label = federation.classes.index(name)
    site = next(iter(federation.sites.values()))
    return bool((site.y == label).any())
