"""Divides the server's arithmetic among threads.

An element of a model belongs to one thread, so their number changes no bit.
"""

import heapq
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

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
