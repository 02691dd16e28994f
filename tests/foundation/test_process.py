"""What a process of the engine asks of Python's garbage collector and of the C library's allocator."""

import ctypes
import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from perennial.foundation.allocator import freeze_objects

MAPPED = """
import ctypes, sys, torch
from perennial.foundation.allocator import keep_freed_memory

class Found(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks".split()]
    _fields_ += [(name, ctypes.c_size_t) for name in "fsmblks uordblks fordblks keepcost".split()]

if sys.argv[1] == "keep":
    keep_freed_memory()
look = ctypes.CDLL(None).mallinfo2
look.restype = Found
before = look().hblkhd
tensor = torch.empty(6_000_000)
print(look().hblkhd - before)
"""


@pytest.fixture
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
def test_what_is_made_for_good_is_not_searched_and_collection_goes_on_afterwards() -> None:
    before = gc.get_freeze_count()
    with freeze_objects():
        assert not gc.isenabled()
        made = [[] for _ in range(100)]
    assert gc.isenabled() and gc.get_freeze_count() >= before + len(made)
    assert not any(found is made for found in gc.get_objects())


def mapped(mode: str) -> int:
    """Bytes that glibc maps for a tensor of 24 MB alone, and unmaps when it is freed."""
    done = subprocess.run([sys.executable, "-c", MAPPED, mode], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="asks glibc 2.33 or newer")
def test_memory_of_tensors_stays_with_the_process() -> None:
    assert mapped("keep") == 0 and mapped("no") >= 24_000_000
