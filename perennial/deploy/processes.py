"""Long-lived processes that belong together: each ends with the others, and the log says why."""

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import NoReturn

log = logging.getLogger("perennial.deploy")
ENDED = 70
"""Exit status where a process ended by itself: 'internal software error' of sysexits.h."""
POLL = 0.2
GRACE = 20.0
"""Seconds for processes to end after they were asked to."""
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux."""


def supervise(
    commands: Mapping[str, Sequence[str]], environment: Mapping[str, str], explain: Callable[[], str]
) -> NoReturn:
    """Run processes until one of them ends or this one is asked to; then end them all, and this process.

    Exit status 0 after SIGTERM or SIGINT, else ENDED, although Flower's own processes end with 0 when they
    are shut out.

    Args:
        commands: command line of each process by name, in the order in which they start.
        environment: of all of them.
        explain: called when one ended by itself; returns why, in a sentence for the log, or ''.
    """
    asked: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, stop)
    running = {
        # no thread runs here yet
        name: subprocess.Popen(command, env=dict(environment), preexec_fn=_end_with_parent)  # noqa: PLW1509
        for name, command in commands.items()
    }
    ended = ""
    while not asked and not ended:
        time.sleep(POLL)
        ended = next((name for name, process in running.items() if process.poll() is not None), "")
    if ended:
        time.sleep(2 * POLL)  # whoever stops a whole group asks all of it at once
    if ended and not asked:
        why = explain()
        log.error("%s ended with status %s%s", ended, running[ended].returncode, f": {why}" if why else "")
    _end(running.values())
    logging.shutdown()
    sys.exit(0 if asked else ENDED)


def _end(processes: Iterable["subprocess.Popen[bytes]"]) -> None:
    found = [process for process in processes if process.poll() is None]
    for process in found:
        process.terminate()
    until = time.monotonic() + GRACE
    for process in found:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_with_parent() -> None:
    """In a new process: end when the parent does, also when that is killed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGTERM)
        if os.getppid() == 1:
            os._exit(ENDED)
