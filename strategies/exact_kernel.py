"""The loops of `ExactSum` for large models, compiled: one pass over memory where PyTorch's operations need
three.

Compiling takes about a second, so only sums that are large enough to win it back import this file. On disk
numba would keep what it compiled as pickles, so each process compiles anew. The sum runs on several threads;
each element is one thread's, so their number changes no bit.
"""

import heapq
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

MOST_THREADS = 4
"""Memory is the limit, and few threads fill it."""
PIECE = 1 << 20

Share = list[tuple[int, int, int]]
"""(row, start, stop) of the pieces that one thread adds."""


@njit(nogil=True, boundscheck=False)
def add_steps(steps: NDArray[np.int64], values: NDArray[Any], weight: float, anchor: float) -> None:
    """steps += bits of (weight * values + anchor), element by element; both (N,) and contiguous.

    anchor: as in `ExactSum`; the addition of it rounds to the grid. Integer sums wrap.
    """
    for index in range(steps.size):
        steps[index] += np.float64(np.float64(values[index]) * weight + anchor).view(np.int64)


@njit(nogil=True, boundscheck=False)
def add_mean(
    reference: NDArray[Any], steps: NDArray[np.int64], offset: int, scale: float, out: NDArray[Any]
) -> None:
    """out = reference + (steps - offset) * scale, computed in float64; all (N,) and contiguous."""
    for index in range(steps.size):
        out[index] = reference[index] + np.float64(steps[index] - offset) * scale


def shares(lengths: Sequence[int]) -> list[Share]:
    """Rows of these lengths in pieces, dealt out to as many threads as there are cores."""
    threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0))))
    loads: list[tuple[int, int]] = [(0, thread) for thread in range(threads)]
    dealt: list[Share] = [[] for _ in range(threads)]
    pieces = [
        (row, start, min(start + PIECE, length))
        for row, length in enumerate(lengths)
        for start in range(0, length, PIECE)
    ]
    for piece in sorted(pieces, key=lambda piece: piece[1] - piece[2]):
        load, thread = heapq.heappop(loads)
        dealt[thread].append(piece)
        heapq.heappush(loads, (load + piece[2] - piece[1], thread))
    return dealt


def add_rows(
    steps: Sequence[NDArray[np.int64]],
    values: Sequence[NDArray[Any]],
    weight: float,
    anchor: float,
    dealt: Sequence[Share],
) -> None:
    """add_steps of each row, by the threads that dealt names."""

    def add(share: Share) -> None:
        for row, start, stop in share:
            add_steps(steps[row][start:stop], values[row][start:stop], weight, anchor)

    others = [_pool().submit(add, share) for share in dealt[1:] if share]
    add(dealt[0])
    for other in others:
        other.result()


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS - 1, thread_name_prefix="exact-sum")
