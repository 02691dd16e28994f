"""activity.jsonl: what a site was asked and what it did, for the hospital's own page.

It names runs as the operator named them, and holds reasons in full, so it stays at the site. Nothing depends
on it: what cannot be written is left out. The ledger, which everything depends on, is another file.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from perennial.foundation.errors import PolicyRefusal, PrivacyError

ACTIVITY = "activity.jsonl"
LARGEST = 4 * 2**20
"""Bytes after which the file begins anew, and the one before is kept beside it."""
LONGEST = 500


@contextmanager
def noted(state_dir: Path, kind: str, **facts: object) -> Iterator[None]:
    """Note that a request came, and how it ended."""
    request = f"{os.getpid()}-{time.time_ns()}"
    _write(state_dir, {"event": "asked", "request": request, "kind": kind, **facts})
    try:
        yield
    except Exception as error:
        refused = isinstance(error, PolicyRefusal | PrivacyError)
        reason = str(error)[:LONGEST] or type(error).__name__
        _write(state_dir, {"event": "refused" if refused else "failed", "request": request, "reason": reason})
        raise
    _write(state_dir, {"event": "answered", "request": request})


def _write(state_dir: Path, facts: dict[str, object]) -> None:
    path = state_dir / ACTIVITY
    with suppress(OSError):
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > LARGEST:
            os.replace(path, path.with_name("activity.before.jsonl"))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            os.write(descriptor, json.dumps({**facts, "time": round(time.time(), 3)}).encode() + b"\n")
        finally:
            os.close(descriptor)
