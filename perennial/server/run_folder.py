"""Opening a run's folder: fresh, resumed after a stop, or continued with new classes."""

import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perennial.config.experiment import Experiment
from perennial.data.schedule import Registry
from perennial.foundation.errors import StateError
from perennial.foundation.files import make_folder, replace_file
from perennial.models.saved import Inputs
from perennial.protocol.stamp import RUN_TOKEN, SPLIT_KEY
from perennial.server.checkpoint import (
    BEFORE,
    CHECKPOINT,
    LATEST,
    Checkpoint,
    load_checkpoint,
    set_damaged_aside,
)
from perennial.server.control import read_split_key
from perennial.server.run_states import Progress, State

FREE_ON_RESUME = ("rounds", "evaluation", "absence")
"""Sections that may change when a run is resumed: they do not change what was trained so far."""


@dataclass
class RunFolder:
    """An open run folder.

    checkpoint: None on a fresh start. inputs: how data are read, as Progress keeps it. note: for the journal.
    cohort: sites that train in one pass.
    """

    path: Path
    checkpoint: Checkpoint | None
    inputs: dict[str, Any]
    note: str = ""
    cohort: int = 1

    @property
    def checkpoint_folder(self) -> Path:
        return self.path / CHECKPOINT

    def create_progress(self) -> Progress:
        """The progress of a run that has not begun.

        Its token and the key of its splits are drawn here, once, from the operating system's secure source.
        An operator may pin the key (server/control.py), to compare two deployed runs on the same splits.
        """
        return Progress(
            run=secrets.token_hex(RUN_TOKEN // 2),
            split_key=read_split_key(self.path) or secrets.token_hex(SPLIT_KEY // 2),
            inputs=self.inputs,
            cohort=self.cohort,
        )


def open_run_folder(
    path: Path, experiment: Experiment, registry: Registry, inputs: Inputs, resume: bool, cohort: int = 1
) -> RunFolder:
    """Open a run's folder, fresh or to resume. Call it while holding it (foundation.files.sole_owner).

    Raises StateError when a fresh run meets an old one, when there is nothing to resume, when a change of the
    experiment, its data or its cohorts contradicts what was trained so far, or when the
    folder cannot be written.
    """
    begun = any((path / CHECKPOINT / name).exists() for name in (LATEST, BEFORE))
    exists = begun or (path / "events.jsonl").exists()
    if exists and not resume:
        raise StateError(f"{path}: holds a run already; resume it, or choose another name")
    if resume and not exists and not (path / "experiment.yaml").exists():
        raise StateError(f"{path}: no run to resume here")
    folder = RunFolder(path, None, _as_stored(inputs), cohort=cohort)
    if begun:
        folder.checkpoint, folder.note = load_checkpoint(folder.checkpoint_folder)
        _require_same_experiment(path, folder.checkpoint, experiment, registry)
        _require_same_inputs(path, folder.checkpoint.progress.inputs, folder.inputs)
        if (began := folder.checkpoint.progress.cohort) != cohort:
            raise StateError(
                f"{path}: cohort: the run began with {began} sites in one pass, found {cohort}; resume it in "
                f"the in-process engine with --cohort {began}, or without --cohort"
            )
        if folder.note:
            set_damaged_aside(folder.checkpoint_folder)
    elif resume:
        # killed before the plan was written, so before any site was asked
        folder.note = "nothing had begun before the stop: started over"
    make_folder(folder.checkpoint_folder)
    replace_file(path / "experiment.yaml", experiment.to_yaml().encode(), mode=0o644)
    return folder


def _require_same_experiment(
    path: Path, checkpoint: Checkpoint, experiment: Experiment, registry: Registry
) -> None:
    """Check that an experiment may go on in this folder: only later tasks may have been added.

    Raises StateError naming each changed key.
    """
    # what these come to is compared instead: the names of classes below, how data are read in the inputs
    read = (
        *("data.classes", "data.normalise", "data.path"),
        *("data.columns", "data.column_kinds", "data.imputation"),
    )
    free = (*FREE_ON_RESUME, "tasks", *read)
    began = checkpoint.read_experiment().model_dump(mode="json")
    found = _find_differences(began, experiment.model_dump(mode="json"), "")
    changed = [f"{key} {values}" for key, values in found.items() if not key.startswith(free)]
    if changed:
        raise StateError(
            f"{path}: the experiment differs from the one this run began with, in: {', '.join(changed)}; "
            "a run may get more tasks, and rounds, evaluation and absence may change while it goes on"
        )
    progress = checkpoint.progress
    over = progress.state is State.FINISHED and registry.schedule.count == progress.registry.schedule.count
    if over and (
        late := [f"{key} {values}" for key, values in found.items() if key.startswith(FREE_ON_RESUME)]
    ):
        raise StateError(
            f"{path}: the run is finished, and its rounds and figures are of other settings than: "
            f"{', '.join(late)}; allowed: the same, or another task"
        )
    _require_plan(path, checkpoint.progress, registry)


def _require_plan(path: Path, progress: Progress, registry: Registry) -> None:
    """Raises StateError unless the registry is the run's plan, or, once it is finished, begins with it."""
    planned = progress.registry
    for position, (old_name, name) in enumerate(zip(planned.classes, registry.classes, strict=False)):
        if old_name != name:
            raise StateError(
                f"{path}: tasks.order, data.classes: class {position} is {old_name!r} in the run's plan and "
                f"{name!r} in the experiment; the classes of a plan keep their names and order"
            )
    finished = progress.state is State.FINISHED
    for key, old, new in (
        ("tasks", planned.schedule.boundaries, registry.schedule.boundaries),
        ("tasks.rounds", planned.schedule.rounds, registry.schedule.rounds),
    ):
        if (new[: len(old)] if finished else new) != old:
            more = (
                "only tasks that follow may be added"
                if finished
                else "a run keeps its plan until it is finished"
            )
            raise StateError(
                f"{path}: {key}: the run's plan is {list(old)}, the experiment now says {list(new)}; {more}"
            )


def _require_same_inputs(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raises StateError when data would reach the model in another way than when the run began."""
    changed = [key for key in new if old.get(key) != new[key]]
    if changed:
        changes = "; ".join(f"{key} was {old.get(key)!r:.120} and is {new[key]!r:.120}" for key in changed)
        raise StateError(
            f"{path}: the data are not read as when the run began: {changes}; the model has learnt from the "
            "first, so restore the data, or write what was found then into data.normalise and data.columns"
        )


def _as_stored(inputs: Inputs) -> dict[str, Any]:
    """As a checkpoint gives it back. The order of the columns is that of the features, so it counts."""
    columns = None if inputs.columns is None else list(inputs.columns.items())
    return json.loads(json.dumps(inputs.to_json() | {"columns": columns}))


def _find_differences(old: Any, new: Any, key: str) -> dict[str, str]:
    """Return the keys with different values, and for each both values in words."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return {} if old == new else {key: f"(was {_as_yaml(old)}, is {_as_yaml(new)})"}
    found: dict[str, str] = {}
    for name in sorted(old.keys() | new.keys()):
        found |= _find_differences(old.get(name), new.get(name), f"{key}.{name}".lstrip("."))
    return found


def _as_yaml(value: Any) -> str:
    """As a person writes a value in an experiment, cut where it is long."""
    return f"{json.dumps(value):.60}"
