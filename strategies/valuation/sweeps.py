"""What the turns of a ring's sweeps have changed, from what the model was worth before and after each."""

from collections.abc import Container, Sequence
from itertools import groupby
from typing import Any

from perennial.learning.worth import Worth, balanced, difference


def sweep_marginals(
    turns: Sequence[dict[str, Any]], end: Worth | None, weighed: Container[int]
) -> list[dict[str, float]]:
    """For each weighed sweep whose change is known: site -> what its turn added, the mean over the classes.

    turns: of one round, in the order in which they happened, with "worth" of the model before, where it is
    known; end: of the model after the last of them. weighed: sweeps whose turns have a worth before and
    after them.
    """
    worths = [*(turn.get("worth") for turn in turns), end]
    measured = [
        (turn, difference(after, before))
        for turn, before, after in zip(turns, worths, worths[1:], strict=False)
        if turn["sweep"] in weighed and before is not None and after is not None
    ]
    return [
        {turn["site"]: balanced(change) for turn, change in sweep}
        for _, sweep in groupby(measured, key=lambda found: found[0]["sweep"])
    ]
