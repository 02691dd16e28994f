"""A sign of life that other processes can see: a file whose time is renewed every few seconds.

A process that was killed or stopped (SIGSTOP), or whose machine froze, no longer renews it, whatever its
health server or its container says. Renewing writes no data, so on a full disk the process still looks alive.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

BEAT = 2.0
"""Seconds between two beats."""
SILENT_AFTER = 8.0
"""Seconds without a beat after which a process counts as dead or stopped."""


@contextmanager
def keep_beating(path: Path) -> Iterator[None]:
    """Renew path while the block runs, and remove it after a regular end."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT):
            renew(path)

    renew(path)
    thread = threading.Thread(target=beat, name=f"heartbeat of {path.name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(OSError):
            path.unlink(missing_ok=True)


def renew(path: Path) -> None:
    """Set the file's time to now, creating it if it is missing; errors are ignored."""
    with suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644))
        os.utime(path)


def last_beat(path: Path) -> float | None:
    """Seconds since the last beat; None where there is none, as after a regular end.

    A beat of the future, after the clock was set back, counts as one of now.
    """
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None


def is_alive(path: Path) -> bool:
    """Whether a process renews path."""
    silence = last_beat(path)
    return silence is not None and silence < SILENT_AFTER
