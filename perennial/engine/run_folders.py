"""Where a new run writes: a folder that is free, chosen before anything else happens."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from perennial.config.run import resolve_runs_folder
from perennial.foundation.errors import ConfigError, StateError
from perennial.foundation.files import make_folder
from perennial.foundation.names import RUN_NAME_RULE, is_run_name

_JOURNAL, _SUMMARY, _LOCK = "events.jsonl", "summary.json", "lock"
_MARKS = (_JOURNAL, _LOCK)
"""Any of these says that a folder is a run's."""


@contextmanager
def create_run_folder(name: str, runs: Path | str, overwrite: bool = False) -> Iterator[Path]:
    """An empty folder for one new run; where the run was refused before it began, none is left behind.

    The folder is NAME, or NAME-2 and so on where earlier runs, or other people's files, have those names. A
    run without a finished round, which nobody works on, is removed, and its folder taken over.

    Args:
        name: of the folder.
        runs: the folder that holds run folders.
        overwrite: take the place of the run in the folder NAME, which is removed once the new one has begun.

    Raises:
        ConfigError: the name is not that of one folder.
        StateError: the folder cannot be made, or its run is still at work and was to be overwritten.
    """
    first = locate_run_folder(name, runs)
    make_folder(first.parent)
    earlier = _set_aside(first) if overwrite else None
    folders = (first if number == 1 else first.with_name(f"{name}-{number}") for number in count(1))
    folder, claim = next((each, claim) for each in folders if (claim := _claim(each)) is not None)
    try:
        yield folder
    except BaseException:
        if not (folder / _JOURNAL).exists():
            shutil.rmtree(folder, ignore_errors=True)
            if earlier is not None:
                earlier.rename(folder)
            with suppress(OSError):
                folder.parent.rmdir()
        raise
    finally:
        os.close(claim)
        if earlier is not None:
            shutil.rmtree(earlier, ignore_errors=True)


def locate_run_folder(name: str, runs: Path | str) -> Path:
    """Absolute path of a run's folder. Raises ConfigError unless the name is that of one folder."""
    parent = resolve_runs_folder(runs)
    if not is_run_name(name):
        raise ConfigError(
            f"--name: found {name!r:.80}, allowed {RUN_NAME_RULE}; it lies in {parent}, which --runs chooses"
        )
    return parent / name


def require_own_folder(resumed: Path, name: str, runs: Path | str) -> None:
    """Raises ConfigError where a name, or a folder of runs, is not that of the run that goes on."""
    folder = resumed.resolve()
    if name not in ("", folder.name):
        raise ConfigError(f"--name: found {name!r} with --resume; a run goes on in its own folder, {folder}")
    if str(runs) != "runs" and resolve_runs_folder(runs).resolve() != folder.parent:
        raise ConfigError(f"--runs: found {runs} with --resume; a run goes on in its own folder, {folder}")


def has_finished_round(folder: Path) -> bool:
    """Whether a run's journal tells of a finished round, or its summary is there."""
    if (folder / _SUMMARY).exists():
        return True
    try:
        with (folder / _JOURNAL).open("rb") as journal:
            return any(line.startswith(b'{"event": "round"') for line in journal)
    except OSError:
        return False


def _claim(folder: Path) -> int | None:
    """A descriptor that holds a folder, now empty, for a new run until it is closed; None: not to be had."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not _is_free(folder):
            return None
    except OSError as error:
        raise StateError(f"{folder}: no folder, and none can be made here ({error.strerror})") from error
    claim = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(claim)
        return None
    except OSError:
        pass  # some network file systems lock no folders
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return claim


def _is_free(folder: Path) -> bool:
    """Whether a folder is empty, or holds a run without a finished round that nobody works on."""
    if not folder.is_dir() or is_held(folder) or has_finished_round(folder):
        return False
    return _is_run(folder) or not any(folder.iterdir())


def _set_aside(folder: Path) -> Path | None:
    """Where the run now lies that gives way; None: there is none. Raises StateError where it must stay."""
    if is_held(folder):
        raise StateError(f"{folder}: in use by another process; wait for it to end, or choose another name")
    earlier = folder.with_name(f".{folder.name}.earlier")
    if not os.path.lexists(folder) or _is_free(folder):
        # one that a killed process had set aside goes back, should this run be refused
        return earlier if earlier.is_dir() else None
    if not _is_run(folder):
        raise StateError(f"{folder}: holds files that are no run's; choose another name")
    shutil.rmtree(earlier, ignore_errors=True)
    return folder.rename(earlier)


def _is_run(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in _MARKS)


def is_held(folder: Path) -> bool:
    """Whether a process works in a run's folder, or is about to: the import of PyTorch takes seconds."""
    return any(map(_is_locked, (folder / _LOCK, folder)))


def _is_locked(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    finally:
        os.close(file)
    return False
