"""How the C library's allocator treats the memory of freed tensors."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's malloc.h."""
LARGEST_KEPT = 32 << 20
"""Bytes; glibc takes no more for this."""
KEPT = 128 << 20
"""Bytes of freed memory that stay with the process."""


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
