"""Keeps Python's garbage collector away from what lives as long as the process."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def permanent() -> Iterator[None]:
    """Context manager: exclude from garbage collection all that exists at the end of the block.

    For the imports of a command: they make hundreds of thousands of objects that stay, and the collector
    would look at all of them several times on the way, again during the run, and once more when the process
    ends. Processes that are forked afterwards share their memory undisturbed.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
