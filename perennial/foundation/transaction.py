"""A SQLite file that several processes change, each alone and in one step that a power cut cannot tear."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perennial.foundation.errors import StateError
from perennial.foundation.files import make_folder

LOCK_SECONDS = 60.0


@contextmanager
def transaction(path: Path, tables: tuple[str, ...], otherwise: str) -> Iterator[sqlite3.Connection]:
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
