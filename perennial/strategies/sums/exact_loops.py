"""The passes of `ExactSum` over a large model: NumPy in pieces that stay in the cache, on several threads.

Each element belongs to one thread, so the number of threads changes no bit. PyTorch's operations would not
give the same bits: its multiplication and addition round once together.
"""

import heapq
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

PIECE = 1 << 20
CHUNK = 1 << 16
"""Values that NumPy's passes take at a time: 512 KiB in float64."""
MOST_THREADS = 4
"""Memory is the limit, and few threads fill it."""

Share = list[tuple[int, int, int]]
"""(row, start, stop) of the pieces that one thread adds."""
T = TypeVar("T")
R = TypeVar("R")


def divide_rows(lengths: Sequence[int]) -> list[Share]:
    """Pieces of rows of these lengths, divided among as many threads as there are cores."""
    pieces = [
        (row, start, min(start + PIECE, length))
        for row, length in enumerate(lengths)
        for start in range(0, length, PIECE)
    ]
    return deal(pieces, lambda piece: piece[2] - piece[1])


def add_rows(
    steps: Sequence[NDArray[np.int64]],
    update: Sequence[NDArray[Any]],
    weight: float,
    anchor: float,
    dealt: Sequence[Share],
) -> None:
    """steps += bits of (weight * update + anchor), row by row, in threads. dealt: from divide_rows().

    anchor: as in `ExactSum`; the addition of it rounds to the grid. Integer sums wrap.
    """

    def add(share: Share) -> None:
        room = np.empty(min(CHUNK, max(stop - start for _, start, stop in share)))
        for row, first, stop in share:
            for start in range(first, stop, CHUNK):
                part = slice(start, min(start + CHUNK, stop))
                terms = room[: part.stop - start]
                np.multiply(update[row][part], weight, out=terms, dtype=np.float64)
                terms += anchor
                steps[row][part] += terms.view(np.int64)

    run_on_threads("exact-sum", add, dealt)


def add_mean(
    reference: NDArray[Any], steps: NDArray[np.int64], offset: int, scale: float, out: NDArray[Any]
) -> None:
    """out = reference + (steps - offset) * scale, computed in float64; all (N,) and contiguous."""
    for start in range(0, steps.size, CHUNK):
        part = slice(start, start + CHUNK)
        mean = (steps[part] - np.int64(offset)).astype(np.float64)
        mean *= scale
        mean += reference[part]
        out[part] = mean


def deal(items: Iterable[T], size: Callable[[T], int]) -> list[list[T]]:
    """The items divided among as many threads as there are cores, with sums of sizes as even as possible."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    loads = [(0, thread) for thread in range(max(1, min(MOST_THREADS, cores)))]
    dealt: list[list[T]] = [[] for _ in loads]
    for item in sorted(items, key=size, reverse=True):
        load, thread = heapq.heappop(loads)
        dealt[thread].append(item)
        heapq.heappush(loads, (load + size(item), thread))
    return [share for share in dealt if share]


def run_on_threads(pool: str, work: Callable[[list[T]], R], dealt: Sequence[list[T]]) -> list[R]:
    """[work(share)] for the shares in `dealt`; the first runs in this thread. Raises what work raised.

    pool: whose threads take the others. Work may hand parts of itself to another pool, never to its own,
    whose threads could all be waiting for each other.
    """
    if not dealt:
        return []
    others = [_pool(pool).submit(work, share) for share in dealt[1:]]
    first = work(dealt[0])
    return [first, *(other.result() for other in others)]


@lru_cache
def _pool(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS - 1, thread_name_prefix=name)
