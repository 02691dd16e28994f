"""The key under which a site knows its records again: drawn once, in state_dir, and never told to anybody."""

import secrets
from pathlib import Path

from perennial.foundation.errors import StateError
from perennial.foundation.files import lock_folder, make_folder, replace_file

FOLDER, KEY, BOOK, SETS = "records", "key", "book.sqlite", "sets"
"""Folder in state_dir; what lies in it."""
KEY_BYTES = 32


def record_key(state_dir: Path) -> bytes:
    """(32 bytes) The site's own key for identities, drawn the first time. Raises StateError when damaged."""
    folder = state_dir / FOLDER
    path = folder / KEY
    make_folder(folder)
    with lock_folder(folder):
        if not path.exists():
            if (folder / BOOK).exists():
                raise StateError(
                    f"{path}: missing beside {BOOK}; put a copy back. Without it no record is known "
                    "again, so that nothing may leave"
                )
            replace_file(path, secrets.token_bytes(KEY_BYTES))
        key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise StateError(
            f"{path}: found {len(key)} bytes, allowed {KEY_BYTES}; put a copy back. Without it no record is "
            "known again, so that nothing may leave"
        )
    return key
