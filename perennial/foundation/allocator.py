"""How a run's process treats memory: freed tensors, large pages, and what never becomes garbage."""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's malloc.h."""
LARGEST_KEPT = 32 << 20
"""Bytes; glibc takes no more for this."""
KEPT = 128 << 20
"""Bytes of freed memory that stay with the process."""


LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""What PyTorch reads when it makes its first tensor."""


def ask_for_large_pages() -> None:
    """Let PyTorch ask the kernel for pages of 2 MiB under tensors that are larger, before it makes the first.

    The matrices of a closed form are hundreds of megabytes, freed and made anew at each site, and touching
    each of their small pages for the first time took a tenth of a run. A choice of the user's own stays.
    """
    os.environ.setdefault(LARGE_PAGES, "1")


def keep_freed_memory() -> None:
    """Keep the memory of freed tensors for the next ones, rather than give it back to the system.

    Activations of a few hundred KiB are made and freed in every step. Left to itself, glibc maps them anew
    again and again, and a page that is touched for the first time costs more than the arithmetic on it. No
    value changes. Does nothing where the C library is another one.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT)


@contextmanager
def freeze_objects() -> Iterator[None]:
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
