"""Computes what each turn of a ring's sweeps changed, from the model's worth before and after it."""

from collections.abc import Container, Sequence
from itertools import groupby
from typing import Any

from perennial.learning.worth import Worth, balanced, difference


def sweep_marginals(
    turns: Sequence[dict[str, Any]], end: Worth | None, weighed: Container[int]
) -> list[dict[str, float]]:
    """For each measured sweep: site -> change of the model's worth by its turn, as a mean over classes.

    turns: of one round, in order, each with "site", "sweep" and "worth", that of the model before, if known.
    end: worth of the model after the last turn. weighed: sweeps to return. Turns without a known worth before
    and after them are left out.
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
