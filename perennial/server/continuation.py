"""Continuing a finished run with new classes: the old order stays, the new classes follow it.

A run that is not finished goes on with the plan in its record. What a finished run has learnt is read from
there too, since data may have lost what is no longer needed. The result is an experiment that says everything
by itself (class order, increments, rounds, how data are read), so that every site of every engine comes to
the same registry from the file alone.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perennial.config.experiment import Experiment
from perennial.config.simulation import forget_simulated
from perennial.data.config import DataConfig
from perennial.data.federation import build
from perennial.data.schedule import Registry, build_registry
from perennial.data.sources import load
from perennial.data.table_columns import locate_numbers
from perennial.data.tasks_config import TasksConfig
from perennial.foundation.errors import ConfigError, StateError
from perennial.server.checkpoint import BEFORE, CHECKPOINT, LATEST, load_checkpoint
from perennial.server.run_states import State


def plan_registry(experiment: Experiment) -> Registry:
    """The registry of the experiment's classes and tasks.

    Reads the data, unless they are at the sites alone. Raises ConfigError if data.classes is missing then.
    """
    data = experiment.data
    if data.only_at_sites:
        if data.classes is None:
            raise ConfigError(
                "data.classes: missing; a server without data needs the registry of class names"
            )
        return build_registry(data.classes, experiment.tasks, experiment.seed)
    return build(data, experiment.tasks, experiment.seed).registry


@dataclass(frozen=True)
class Learnt:
    """The record of a run: what was planned, and what has been learnt of it.

    experiment: as the run's checkpoint has it. registry: the plan, which a finished run has learnt. task: the
    one that comes next. inputs: how data reach the model.
    """

    experiment: Experiment
    registry: Registry
    task: int
    inputs: dict[str, Any]
    finished: bool

    @classmethod
    def of(cls, folder: Path) -> "Learnt | None":
        """Read a run folder's record; None if no site was asked anything. Raises StateError if damaged."""
        if not any((folder / CHECKPOINT / name).exists() for name in (LATEST, BEFORE)):
            return None
        checkpoint = load_checkpoint(folder / CHECKPOINT)[0]
        progress = checkpoint.progress
        return cls(
            checkpoint.read_experiment(),
            progress.registry,
            progress.task,
            progress.inputs,
            progress.state is State.FINISHED,
        )


def has_growing_data(experiment: Experiment) -> bool:
    """Whether the server reads data of a person's own, in which new classes may appear."""
    return experiment.data.kind.collected and not experiment.data.only_at_sites


def find_classes(data: DataConfig) -> tuple[str, ...]:
    """Names of the classes that a folder, table or file holds now, whatever the experiment lists."""
    return load(data.model_copy(update={"classes": None}), seed=0).classes


def continue_experiment(folder: Path, learnt: Learnt | None, new: Experiment) -> Experiment:
    """The new experiment with its class order and schedule written out, those that the run has learnt first.

    folder: of the run. learnt: its record. If the new experiment names neither classes nor tasks, the
    classes in its data that were not learnt make one more task.
    Raises ConfigError when the two do not fit, StateError when a run that is not finished would grow.
    """
    if learnt is None:
        return new
    old = learnt.experiment
    said = new.tasks != old.tasks or new.data.classes != old.data.classes
    if not learnt.finished:
        if said:
            raise StateError(
                f"{folder}: this run has not finished the tasks that it began with; resume it without "
                "changes first, then with more classes"
            )
        _require_planned(folder, new, learnt)
        return new
    known = learnt.registry.classes
    if has_growing_data(new) and new.data.classes == old.data.classes:
        forget_simulated()
        found = find_classes(new.data)
        names = (*known, *(name for name in found if name not in known))
        _require_exemplars(new, [name for name in known if name not in found])
    elif new.data.only_at_sites or new.data.classes is not None:
        names = new.data.classes or known
    elif said:
        names = find_classes(new.data)
    else:
        return new
    if len(names) == len(known) and not said:
        return _read_as_before(new, learnt) if has_growing_data(new) else new
    if len(names) == len(known) and new.tasks != old.tasks:
        _require_same_plan(build_registry(names, new.tasks, new.seed), learnt.registry)
    tasks = new.tasks if new.tasks != old.tasks else _append_task(learnt.registry, names)
    registry = build_registry(names, tasks, new.seed, learnt.registry)
    new = new.model_copy(update={"data": new.data.model_copy(update={"classes": tuple(names)})})
    return _write_out(new, registry, learnt.inputs, learnt=learnt.registry.schedule.count)


def _require_same_plan(said: Registry, learnt: Registry) -> None:
    """Raises ConfigError where other tasks are asked of a finished run to which no class came."""
    if said.schedule != learnt.schedule:
        plans = [
            f"classes {list(schedule.boundaries)}, rounds {list(schedule.rounds)}"
            for schedule in (learnt.schedule, said.schedule)
        ]
        raise ConfigError(
            f"tasks: the run has learnt {plans[0]}; found {plans[1]} and no new class, so nothing would be "
            "trained; choose another name for a run with these tasks"
        )


def _read_as_before(new: Experiment, learnt: Learnt) -> Experiment:
    """The experiment whose data are read as when the run began, where records of known classes have come.

    A mean or a category of the new records would change what the model sees.
    """
    from perennial.config.simulation import load_simulated_federation

    pinned = _as_read(new.data, learnt.inputs)
    federation = load_simulated_federation(new)
    now = federation.mean.tolist(), federation.std.tolist()
    same = now == (learnt.inputs["mean"], learnt.inputs["std"])
    forget_simulated()
    if not pinned or same:
        return new
    content = new.model_dump(mode="json")
    content["data"] |= pinned
    return Experiment.model_validate(content)


def _require_planned(folder: Path, new: Experiment, learnt: Learnt) -> None:
    """Raises StateError where data hold classes that are not in the plan of a run that is not finished."""
    if not has_growing_data(new):
        return
    forget_simulated()
    if more := [name for name in find_classes(new.data) if name not in learnt.registry.classes]:
        raise StateError(
            f"{folder}: {', '.join(more)} came to the data, and this run has not finished the tasks that it "
            "began with; take them out until it is finished, then resume it once more with them"
        )


def _write_out(new: Experiment, registry: Registry, inputs: dict[str, Any], learnt: int) -> Experiment:
    """The experiment with its classes, tasks and the way in which data are read said outright."""
    content = new.model_dump(mode="json")
    content["tasks"] = registry.as_tasks().model_dump(mode="json") | {"learnt": learnt}
    names = list(new.data.classes or registry.classes)
    content["data"] |= {"classes": names, **_as_read(new.data, inputs)}
    return Experiment.model_validate(content)


def _require_exemplars(experiment: Experiment, absent: list[str]) -> None:
    """Raises StateError when the learner replays classes of which the data hold no record any more."""
    if absent and experiment.learner.memory is not None:
        raise StateError(
            f"data: no record is there any more of {', '.join(absent)}, whose exemplars learner.memory "
            "replays; put these records back (a site notes which it chose, and keeps no copy)"
        )


def _append_task(learnt: Registry, names: tuple[str, ...]) -> TasksConfig:
    """The tasks that were learnt, and one for all new classes with as many rounds as the last of them."""
    schedule, known = learnt.schedule, set(learnt.classes)
    fresh = [name for name in names if name not in known]
    sizes = [len(schedule.list_classes(task)) for task in range(1, schedule.count + 1)]
    if not fresh:
        return learnt.as_tasks()
    return TasksConfig(
        increments=(*sizes, len(fresh)),
        order=(*learnt.classes, *fresh),
        rounds=(*schedule.rounds, schedule.rounds[-1]),
    )


def _as_read(data: DataConfig, inputs: dict[str, Any]) -> dict[str, Any]:
    """How data reached the model when the run began, so that data which grew are read in the same way."""
    if data.only_at_sites or data.normalise is not None:
        return {}
    mean, std = inputs["mean"], inputs["std"]
    if inputs.get("columns") is None:
        return {"normalise": {"mean": mean, "std": std}} if data.source != "csv" else {}
    columns = {name: kind for name, kind in inputs["columns"]}
    places = locate_numbers(columns)
    normalise = {
        key: {name: values[place] for name, place in places.items()}
        for key, values in (("mean", mean), ("std", std))
    }
    found = {"columns": columns, "column_kinds": {}, "normalise": normalise}
    if inputs.get("fill") is not None:
        found["imputation"] = {name: inputs["fill"][place] for name, place in places.items()}
    return found
