"""Holds a run to its first split key; a second one would let held-out samples be trained on."""

import hashlib
from pathlib import Path

from perennial.foundation.errors import ProtocolError
from perennial.foundation.files import make_folder, one_at_a_time, replace_file

RECORD = "split-key.sha256"


def keep_split_key(folder: Path, key: str) -> None:
    """Keep which key a run has, on its first request, and hold every later one to it.

    folder: of the run in the site's state_dir. key: hexadecimal. Kept is its hash, which is enough to tell.
    Raises ProtocolError on another key: a run that could change it would train on test samples, and two
    updates of one round by two splits would tell which records moved.
    """
    path = folder / RECORD
    found = hashlib.sha256(key.encode()).hexdigest()
    make_folder(folder)
    with one_at_a_time(folder):
        if not path.exists():
            replace_file(path, found.encode())
        elif path.read_text() != found:
            raise ProtocolError(
                "split_key: found another one than this run began with; a run keeps its key, and another one "
                "starts another run"
            )
