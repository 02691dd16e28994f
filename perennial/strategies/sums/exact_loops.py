"""The passes of `ExactSum` over a large model: ready at once in NumPy, and compiled while sites train.

Compiling takes about a second, and on disk numba would keep what it compiled as pickles, so each process
compiles anew, in a thread of its own. Updates that arrive before it is done are added in NumPy, in pieces
that stay in the cache; without numba (the extra `server`) all of them are. Both make the same operations on
each element, one after the other, so they give the same bits; PyTorch's would not, whose multiplication and
addition round once together.

Each element belongs to one thread, so the number of threads changes no bit.
"""

import heapq
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from logging import INFO, getLogger
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

log = getLogger("flwr").log
PIECE = 1 << 20
CHUNK = 1 << 16
"""Values that NumPy's passes take at a time: 512 KiB in float64."""

Share = list[tuple[int, int, int]]
"""(row, start, stop) of the pieces that one thread adds."""


class Loops(Protocol):
    """One pass over memory for each step of the sum."""

    def add_steps(
        self,
        steps: NDArray[np.int64],
        values: Sequence[NDArray[Any]],
        weights: Sequence[float],
        anchor: float,
    ) -> None:
        """steps += bits of (weight * row + anchor) for each row of values; all (N,) and contiguous.

        anchor: as in `ExactSum`; the addition of it rounds to the grid. Integer sums wrap.
        """
        ...

    def add_mean(
        self,
        reference: NDArray[Any],
        steps: NDArray[np.int64],
        offset: int,
        scale: float,
        out: NDArray[Any],
    ) -> None:
        """out = reference + (steps - offset) * scale, computed in float64; all (N,) and contiguous."""
        ...


class NumPyLoops:
    """`Loops` in several passes over pieces."""

    def add_steps(
        self,
        steps: NDArray[np.int64],
        values: Sequence[NDArray[Any]],
        weights: Sequence[float],
        anchor: float,
    ) -> None:
        room = np.empty(min(CHUNK, steps.size))
        for start in range(0, steps.size, CHUNK):
            total, terms = steps[start : start + CHUNK], room[: steps.size - start]
            for row, weight in zip(values, weights, strict=True):
                np.multiply(row[start : start + CHUNK], weight, out=terms, dtype=np.float64)
                terms += anchor
                total += terms.view(np.int64)

    def add_mean(
        self,
        reference: NDArray[Any],
        steps: NDArray[np.int64],
        offset: int,
        scale: float,
        out: NDArray[Any],
    ) -> None:
        for start in range(0, steps.size, CHUNK):
            part = slice(start, start + CHUNK)
            mean = (steps[part] - np.int64(offset)).astype(np.float64)
            mean *= scale
            mean += reference[part]
            out[part] = mean


NUMPY = NumPyLoops()


def begin_compiling() -> None:
    """Start to compile the loops in a thread, once in a process, while a round's requests are out."""
    _compiled()


def loops() -> Loops:
    """The compiled loops if they are ready, else NumPy's."""
    compiled = _compiled()
    return compiled.result() if compiled.done() else NUMPY


@lru_cache
def _compiled() -> "Future[Loops]":
    def compile_loops() -> Loops:
        try:
            from perennial.strategies.sums.exact_kernel import compiled_loops

            return compiled_loops()
        # the bits are the same, so whatever keeps a machine from compiling costs time alone
        except Exception as error:
            log(
                INFO,
                "Sums of large models run in NumPy, because their loops cannot be compiled here (%s: %s); "
                "pip install 'perennial-fl[server]' has what compiles them",
                type(error).__name__,
                error,
            )
            return NUMPY

    return ThreadPoolExecutor(1, thread_name_prefix="compile-sum").submit(compile_loops)


def shares(lengths: Sequence[int]) -> list[Share]:
    """Pieces of rows of these lengths, divided among as many threads as there are cores."""
    pieces = [
        (row, start, min(start + PIECE, length))
        for row, length in enumerate(lengths)
        for start in range(0, length, PIECE)
    ]
    return deal(pieces, lambda piece: piece[2] - piece[1])


def add_rows(
    steps: Sequence[NDArray[np.int64]],
    updates: Sequence[Sequence[NDArray[Any]]],
    weights: Sequence[float],
    anchor: float,
    dealt: Sequence[Share],
) -> None:
    """Do add_steps on each row of steps and the same row of each update, in threads. dealt: from shares()."""
    passes = loops()

    def add(share: Share) -> None:
        for row, start, stop in share:
            values = [rows[row][start:stop] for rows in updates]
            passes.add_steps(steps[row][start:stop], values, weights, anchor)

    on_threads("exact-sum", add, dealt)


MOST_THREADS = 4
"""Memory is the limit, and few threads fill it."""

T = TypeVar("T")
R = TypeVar("R")


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


def on_threads(pool: str, work: Callable[[list[T]], R], dealt: Sequence[list[T]]) -> list[R]:
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
