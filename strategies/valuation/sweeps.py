"""What the turns of a ring's sweeps have changed, from what the model was worth before and after each."""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from perennial.learning.worth import Worth, balanced, difference


@dataclass(frozen=True)
class ValuedTurn:
    """A turn before and after which the model was valued.

    change: (M,) what the model was worth on each class after the turn, minus before; None where nobody
    measured.
    """

    site: str
    change: Sequence[float | None]


def valued_sweeps(
    turns: Sequence[dict[str, Any]], end: Worth | None, weighed: Container[int]
) -> Iterator[list[ValuedTurn]]:
    """The turns of each weighed sweep whose change is known, in the order in which they happened.

    turns: of one round, with "worth" of the model before, where it is known; end: of the model after the last
    of them. weighed: sweeps whose turns have a worth before and after them.
    """
    worths = [*(turn.get("worth") for turn in turns), end]
    measured = [
        (turn, difference(after, before))
        for turn, before, after in zip(turns, worths, worths[1:], strict=False)
        if turn["sweep"] in weighed and before is not None and after is not None
    ]
    for _, sweep in groupby(measured, key=lambda found: found[0]["sweep"]):
        yield [ValuedTurn(turn["site"], change) for turn, change in sweep]


def sweep_marginals(sweeps: Iterable[Sequence[ValuedTurn]]) -> list[dict[str, float]]:
    """For each sweep: site -> what its turn added, the mean over the classes."""
    return [{turn.site: balanced(turn.change) for turn in sweep} for sweep in sweeps]
