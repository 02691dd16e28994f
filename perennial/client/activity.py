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

from perennial.foundation.errors import KINDS, PolicyRefusal, PrivacyError, clean_text

ACTIVITY, BEFORE = "activity.jsonl", "activity.before.jsonl"
LARGEST = 4 * 2**20
"""Bytes after which the file begins anew, and the one before is kept beside it."""
LONGEST = 500


@contextmanager
def note_request(state_dir: Path, kind: str, **facts: object) -> Iterator[None]:
    """Log a request, and how the block that answers it ended: answered, refused or failed with its error.

    kind: of the request. facts: JSON-able, logged with it, such as site and round. Errors are raised again.
    """
    request = f"{os.getpid()}-{time.time_ns()}"
    _write(state_dir, {"event": "asked", "request": request, "kind": kind, **facts})
    try:
        yield
    except Exception as error:
        refused = isinstance(error, PolicyRefusal | PrivacyError)
        words = str(error) or type(error).__name__
        reason = clean_text(f"{KINDS.get(type(error), 'error')}: {words}", LONGEST)
        _write(state_dir, {"event": "refused" if refused else "failed", "request": request, "reason": reason})
        raise
    _write(state_dir, {"event": "answered", "request": request})


def note_unapproved(state_dir: Path, app: str) -> None:
    """Write down that an app was sent which is not approved here. app: its SHA-256."""
    _write(state_dir, {"event": "not_approved", "app": app})


def run_names(state_dir: Path) -> dict[str, str]:
    """Run token -> the operator's name of the run, for the runs in the activity log; {} without one."""
    found: dict[str, str] = {}
    for name in (BEFORE, ACTIVITY):
        with suppress(OSError):
            for line in (state_dir / name).read_bytes().splitlines():
                with suppress(ValueError, RecursionError):
                    event = json.loads(line)
                    if isinstance(event, dict) and event.get("run") and event.get("name"):
                        found[str(event["run"])] = str(event["name"])
    return found


def _write(state_dir: Path, facts: dict[str, object]) -> None:
    path = state_dir / ACTIVITY
    with suppress(OSError):
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > LARGEST:
            os.replace(path, path.with_name(BEFORE))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            os.write(descriptor, json.dumps({**facts, "time": round(time.time(), 3)}).encode() + b"\n")
        finally:
            os.close(descriptor)
