"""Work on the layers of a large model on several threads; each layer is one thread's, so that their number
changes no bit."""

import heapq
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

MOST_THREADS = 4
"""Memory is the limit, and few threads fill it."""
WORTH_THREADS = 1 << 22
"""Values in a model from which handing work to threads pays."""

T = TypeVar("T")
Bundle = list[str]


def bundles(sizes: Mapping[str, int]) -> list[Bundle]:
    """Layers by number of values, dealt out as evenly as they come to as many threads as there are cores; all
    in one bundle, in order, where the model is small."""
    if sum(sizes.values()) < WORTH_THREADS:
        return [list(sizes)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    loads: list[tuple[int, int]] = [(0, thread) for thread in range(max(1, min(MOST_THREADS, cores)))]
    dealt: list[Bundle] = [[] for _ in loads]
    for layer in sorted(sizes, key=lambda layer: (-sizes[layer], layer)):
        load, thread = heapq.heappop(loads)
        dealt[thread].append(layer)
        heapq.heappush(loads, (load + sizes[layer], thread))
    return [bundle for bundle in dealt if bundle]


def of_each(dealt: list[Bundle], work: Callable[[str], T]) -> dict[str, T]:
    """work of every layer, a bundle a thread. Raises what work raised first."""

    def of_bundle(bundle: Bundle) -> dict[str, T]:
        return {layer: work(layer) for layer in bundle}

    others = [_pool().submit(of_bundle, bundle) for bundle in dealt[1:]]
    results = of_bundle(dealt[0]) if dealt else {}
    for other in others:
        results |= other.result()
    return results


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS - 1, thread_name_prefix="layers")
