"""Files that survive a kill, a full disk and a second process.

A file is either the old one or the new one, never half of each; a folder has one owner at a time.
"""

import fcntl
import glob
import hashlib
import os
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import TextIO

from perennial.foundation.errors import StateError


def replace_file(
    path: Path, data: bytes | Iterable[bytes | memoryview], mode: int = 0o600, *, durable: bool = True
) -> None:
    """Put data at path in one atomic, durable step; of several writers at once, the last one's stays.

    The bytes are on the disk before the old file disappears. On any error (a full disk, say) the old file
    stays as it was and the partial one is removed; what a killed writer left of its own is removed by the
    next one.
    data: the bytes, or pieces of them. durable: False does not wait for the disk, so that a power cut may
    leave a damaged file.
    Raises StateError naming the path.
    """
    partial = None
    try:
        _remove_left_over(path)
        partial, descriptor = _open_partial(path, mode)
        with os.fdopen(descriptor, "wb") as file:
            for piece in (data,) if isinstance(data, bytes) else data:
                file.write(piece)
            file.flush()
            if durable:
                os.fsync(file.fileno())
            os.replace(partial, path)
        if durable:
            flush_folder(path.parent)
    except OSError as error:
        if partial is not None:
            partial.unlink(missing_ok=True)
        raise StateError(
            f"{path}: could not be written ({error.strerror}); the previous file is unchanged"
        ) from error


def _open_partial(path: Path, mode: int) -> tuple[Path, int]:
    """A new file beside path and its descriptor, locked while its writer lives."""
    while True:
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return partial, descriptor
        # before it was locked, another writer took it for a left-over
        os.close(descriptor)


def _remove_left_over(path: Path) -> None:
    """Remove partial files of path that nobody writes any more."""
    for partial in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        with suppress(OSError), open(partial, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            partial.unlink()


def hash_file(path: Path) -> str:
    """SHA-256 (hexadecimal) of a file's bytes, as `sha256sum` shows it."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_folder(folder: Path, mode: int = 0o700) -> None:
    """Create a folder and missing ones above it, each with this mode from its first moment.

    Raises StateError naming it when it is a file or cannot be made.
    """
    try:
        _make(folder, mode)
    except OSError as error:
        raise StateError(f"{folder}: no folder, and none can be made here ({error.strerror})") from error


def _make(folder: Path, mode: int) -> None:
    # Path.mkdir(parents=True) gives the mode to the last folder alone
    try:
        folder.mkdir(mode=mode)
    except FileNotFoundError:
        _make(folder.parent, mode)
        folder.mkdir(mode=mode, exist_ok=True)
    except FileExistsError:
        if not folder.is_dir():
            raise


SHARED_STATE = (
    "Set XDG_STATE_HOME to the absolute path of a folder that all sites of this machine share and can write"
)


def find_user_state() -> Path:
    """The folder of the user's state for all sites on this machine: in XDG_STATE_HOME, or in ~/.local/state.

    Raises StateError when the user has no home.
    """
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    try:
        return (given if given.is_absolute() else Path.home() / ".local" / "state") / "perennial" / "ledgers"
    except RuntimeError as error:
        raise StateError(f"this user has no home folder ({error}). {SHARED_STATE}") from error


def open_private(path: Path) -> TextIO:
    """Open path to read and append, created with mode 0600 if missing. Raises OSError, also on a link."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o600), "a+", encoding="utf-8")


def measure_size(folder: Path) -> int:
    """Bytes of the files in a folder and below it; 0 without a folder."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size
        except FileNotFoundError:
            continue  # another process has replaced a record
    return total


def flush_folder(folder: Path) -> None:
    """Make a rename or a new file in folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Context manager: wait until no other living process is inside such a block for this folder."""
    with open_private(folder / "turn") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def hold_folder(folder: Path, owner: str) -> Iterator[None]:
    """Hold folder for this process alone; the kernel releases it when the process ends, however it ends.

    owner: who we are, written into the lock file for the person who meets it.
    Raises StateError when another process holds the folder, or when it cannot be made or written to.
    """
    make_folder(folder)
    try:
        file = open_private(folder / "lock")
    except OSError as error:
        raise StateError(f"{folder}: cannot be written to ({error.strerror})") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise StateError(
                f"{folder}: in use by another process ({file.read().strip() or 'unknown'}); "
                "wait for it to end, or choose another folder"
            ) from None
        file.truncate(0)
        file.write(f"{owner}, process {os.getpid()}\n")
        file.flush()
        yield


class DiskWrites:
    """Flushes files that were replaced without waiting; of one batch at a time.

    Until a batch is there, a power cut may leave its files damaged. A killed process leaves them whole.
    """

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._failed: StateError | None = None

    def begin(self, paths: Sequence[Path]) -> None:
        """Flush files and their folders in a thread, in this order, once the batch before is there."""
        self.wait()
        self._thread = Thread(target=self._flush, args=(tuple(paths),), name="disk writes")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the batch is on the disk. Raises StateError naming a file that could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def _flush(self, paths: Sequence[Path]) -> None:
        for path in paths:
            try:
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                flush_folder(path.parent)
            except OSError as error:
                self._failed = StateError(f"{path}: could not be written ({error.strerror})")
                return


LOCK_SECONDS = 60.0


@contextmanager
def open_transaction(path: Path, tables: tuple[str, ...], otherwise: str) -> Iterator[sqlite3.Connection]:
    """Context manager: one SQLite transaction, for this process alone, written wholly or not at all.

    path: mode 0600, made if missing. tables: each as CREATE TABLE takes it. otherwise: what does not happen
    if the file cannot be used, in words for the StateError.
    """
    make_folder(path.parent)
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        book = sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None)
    except (OSError, sqlite3.Error) as error:
        raise StateError(f"{path}: cannot be opened ({error}); {otherwise}") from error
    try:
        book.execute("PRAGMA synchronous = FULL")
        book.execute("BEGIN IMMEDIATE")
        for table in tables:
            book.execute(f"CREATE TABLE IF NOT EXISTS {table}")
        yield book
        book.execute("COMMIT")
    except sqlite3.Error as error:
        raise StateError(f"{path}: damaged or full ({error}); {otherwise}") from error
    finally:
        book.close()
