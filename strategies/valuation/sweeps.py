"""What the turns of a ring's sweeps have changed, from what the model was worth before and after each."""

from collections.abc import Container, Iterable, Iterator
from typing import Any

from perennial.learning.worth import Worth, balanced, difference
from perennial.protocol.stamp import MAX_EXAMPLES


def turn_changes(
    turns: list[dict[str, Any]], end: Worth | None, weighed: Container[int]
) -> Iterator[tuple[dict[str, Any], list[float | None]]]:
    """Each turn of a weighed sweep, with what the model was worth on each class after it minus before it.

    turns: in the order in which they happened, with "worth" of the model before, where it is known; end: of
    the model after the last of them. weighed: sweeps whose turns have a worth before and after them.
    """
    worths = [*(turn.get("worth") for turn in turns), end]
    for turn, before, after in zip(turns, worths, worths[1:], strict=False):
        if turn["sweep"] in weighed and before is not None and after is not None:
            yield turn, difference(after, before)


def sweep_marginals(
    changes: Iterable[tuple[dict[str, Any], list[float | None]]],
) -> list[dict[str, float]]:
    """For each sweep of one round: site -> what its turn added, the mean over the classes."""
    rows: dict[int, dict[str, float]] = {}
    for turn, change in changes:
        rows.setdefault(turn["sweep"], {})[turn["site"]] = balanced(change)
    return list(rows.values())


def checked_counts(value: Any) -> list[int | None]:
    """A site's label counts, None for a class that it withholds; nothing for what are no counts."""
    if isinstance(value, list) and all(
        count is None or (type(count) is int and 0 <= count <= MAX_EXAMPLES) for count in value
    ):
        return value
    return []
