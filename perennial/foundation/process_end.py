"""How a command ends."""

import atexit
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ends_in_one_go() -> Iterator[None]:
    """Context manager around a whole command: at its end the process exits without freeing its objects.

    Python would search them for garbage, and Python and PyTorch would free hundreds of thousands of them: a
    tenth of a second, for memory that the system takes back in one step. Before that, threads are awaited,
    exit functions that were registered inside are called, and output is flushed. After an error that nobody
    caught, the process ends as usual.
    """
    status: list[int] = []
    atexit.register(_end, status)
    try:
        yield
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            status.append(leaving.code or 0)
        raise
    else:
        status.append(0)


def _end(status: list[int]) -> None:
    if not status:
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status[0])
