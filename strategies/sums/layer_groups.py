"""Work on the layers of a large model, each on one thread."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from perennial.strategies.sums.threads import deal, on_threads

WORTH_THREADS = 1 << 22
"""Values in a model from which handing work to threads pays."""

T = TypeVar("T")
Group = list[str]


def layer_groups(sizes: Mapping[str, int]) -> list[Group]:
    """Layers by number of values, dealt out to threads; in one group, in order, where the model is small."""
    if sum(sizes.values()) < WORTH_THREADS:
        return [list(sizes)]
    return deal(sizes, lambda layer: sizes[layer])


def of_each(dealt: list[Group], work: Callable[[str], T]) -> dict[str, T]:
    """work of every layer, a group a thread. Raises what work raised first."""
    results: dict[str, T] = {}
    for part in on_threads("layers", lambda group: {layer: work(layer) for layer in group}, dealt):
        results |= part
    return results
