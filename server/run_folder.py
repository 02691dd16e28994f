"""Opening a run's folder: fresh, resumed after a stop, or continued with new classes."""

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.experiment import Experiment
from data.schedule import TaskSchedule
from foundation.errors import StateError
from foundation.files import replace_file
from protocol.messages import RUN_TOKEN
from server.checkpoint import LATEST, Checkpoint, Progress, load_checkpoint

CHECKPOINT = "checkpoint"
FREE_ON_RESUME = ("rounds", "evaluation", "absence")
"""Sections that steer the run and not the result of its past."""


@dataclass
class RunFolder:
    """A run's folder. checkpoint: None on a fresh start. note: for the journal."""

    path: Path
    checkpoint: Checkpoint | None
    note: str = ""

    @property
    def checkpoint_folder(self) -> Path:
        return self.path / CHECKPOINT

    def first_progress(self) -> Progress:
        """The progress of a run that has not begun; its token is drawn here, once."""
        return Progress(run=secrets.token_hex(RUN_TOKEN // 2))


def open_run_folder(path: Path, experiment: Experiment, schedule: TaskSchedule, resume: bool) -> RunFolder:
    """The folder, ready to run in. Call it while holding the folder (foundation.files.sole_owner).

    Raises StateError when a fresh run meets an old one, when there is nothing to resume, or when the
    experiment was changed in a way that its past does not allow.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    exists = (path / CHECKPOINT / LATEST).exists() or (path / "events.jsonl").exists()
    if not resume:
        if exists:
            raise StateError(f"{path}: holds a run already; resume it (--resume), or choose another --name")
        replace_file(path / "experiment.yaml", experiment.to_yaml().encode(), mode=0o644)
        return RunFolder(path, None)
    if not exists:
        raise StateError(f"{path}: no run to resume here")
    if not (path / CHECKPOINT / LATEST).exists():
        # killed before the first round was done: starting over loses nothing
        replace_file(path / "experiment.yaml", experiment.to_yaml().encode(), mode=0o644)
        return RunFolder(path, None, "no round was finished before the stop: started over")
    checkpoint, note = load_checkpoint(path / CHECKPOINT)
    _require_same_experiment(path, checkpoint.experiment, experiment, schedule, checkpoint.progress)
    replace_file(path / "experiment.yaml", experiment.to_yaml().encode(), mode=0o644)
    return RunFolder(path, checkpoint, note)


def _require_same_experiment(
    path: Path, old: dict[str, Any], experiment: Experiment, schedule: TaskSchedule, progress: Progress
) -> None:
    """Raises StateError naming each changed key, unless all that changed is more tasks after those already
    begun."""
    new = experiment.model_dump(mode="json")
    changed = _differences(
        {k: v for k, v in old.items() if k not in (*FREE_ON_RESUME, "tasks")},
        {k: v for k, v in new.items() if k not in (*FREE_ON_RESUME, "tasks")},
        "",
    )
    changed = [key for key in changed if key != "data.classes"]
    if changed:
        raise StateError(
            f"{path}: the experiment differs from the one this run began with, in: {', '.join(changed)}; "
            "only tasks may be added (and rounds, evaluation and absence changed)"
        )
    begun = progress.history["boundaries"]
    if list(schedule.boundaries[: len(begun)]) != begun:
        raise StateError(
            f"{path}: tasks: the run has learnt classes up to {begun}, the experiment now says "
            f"{list(schedule.boundaries)}; tasks that were begun must stay as they were"
        )


def _differences(old: Any, new: Any, key: str) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        names = sorted(old.keys() | new.keys())
        return [
            d
            for name in names
            for d in _differences(old.get(name), new.get(name), f"{key}.{name}".lstrip("."))
        ]
    return [] if old == new else [key]
