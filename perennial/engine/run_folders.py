"""Where a new run writes: a folder that is free, chosen before anything else happens."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from perennial.config.run import resolve_runs_folder
from perennial.foundation.errors import StateError
from perennial.foundation.files import make_folder

_JOURNAL, _SUMMARY, _LOCK = "events.jsonl", "summary.json", "lock"
_MARKS = (_JOURNAL, _SUMMARY, "checkpoint", _LOCK)
"""Any of these says that a folder is a run's."""


@contextmanager
def create_run_folder(name: str, runs: Path | str, overwrite: bool = False) -> Iterator[Path]:
    """A folder for one new run; where the run was refused before it began, none is left behind.

    The folder is NAME, or NAME-2 and so on where earlier runs have those names. A run without a finished
    round, which nobody works on, is removed, and its folder taken over.

    Args:
        name: of the folder.
        runs: the folder that holds run folders.
        overwrite: remove the run in the folder NAME and take its place.

    Raises:
        StateError: the folder cannot be made, or its run is still at work and was to be overwritten.
    """
    parent = resolve_runs_folder(runs)
    make_folder(parent)
    folder = (
        parent / name
        if overwrite
        else next(
            found
            for number in count(1)
            if _claim(found := parent / (name if number == 1 else f"{name}-{number}"))
        )
    )
    if overwrite:
        if is_held(folder):
            raise StateError(
                f"{folder}: in use by another process; wait for it to end, or choose another name"
            )
        if _is_run(folder):
            shutil.rmtree(folder)
        make_folder(folder)
    before = {*folder.iterdir()}
    try:
        yield folder
    except BaseException:
        if not (folder / _JOURNAL).exists():
            _remove_new(folder, before)
        raise


def has_finished_round(folder: Path) -> bool:
    """Whether a run's journal tells of a finished round, or its summary is there."""
    if (folder / _SUMMARY).exists():
        return True
    try:
        with (folder / _JOURNAL).open("rb") as journal:
            return any(line.startswith(b'{"event": "round"') for line in journal)
    except OSError:
        return False


def _claim(folder: Path) -> bool:
    """Whether a new run may write to a folder, which then exists and is empty, or was no run's."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir() or is_held(folder) or has_finished_round(folder):
            return False
        if _is_run(folder):
            shutil.rmtree(folder)
            folder.mkdir(mode=0o700)
    except OSError as error:
        raise StateError(f"{folder}: no folder, and none can be made here ({error.strerror})") from error
    return True


def _remove_new(folder: Path, before: set[Path]) -> None:
    with suppress(OSError):
        for path in {*folder.iterdir()} - before:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        folder.rmdir()
        folder.parent.rmdir()


def _is_run(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in _MARKS)


def is_held(folder: Path) -> bool:
    """Whether a process works in a run's folder, as foundation.files.sole_owner holds it."""
    try:
        with (folder / _LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
