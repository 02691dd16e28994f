"""What the turns of a ring's sweeps have changed, from what the model was worth before and after each."""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from perennial.learning.worth import Worth, balanced, difference
from perennial.protocol.stamp import MAX_EXAMPLES


@dataclass(frozen=True)
class ValuedTurn:
    """A turn before and after which the model was valued.

    held: (M,) samples of each class that the site trained on; None for a class that it withholds.
    before, change: (M,) what the model was worth on each class before the turn, and after it minus before;
    None where nobody measured. norm: of the update, as it counted. alignment: cosine of the update and the
    direction in which the loss on the site's classes falls fastest; None where nobody measured.
    """

    site: str
    held: Sequence[int | None]
    before: Sequence[float | None]
    change: Sequence[float | None]
    norm: float = 0.0
    alignment: float | None = None

    @property
    def gain(self) -> float | None:
        """The mean change of the site's classes, weighted by its samples; None where none was measured."""
        return self._of_own(self.change)

    @property
    def worth_before(self) -> float | None:
        """What the model was worth on these classes, weighted alike."""
        return self._of_own(self.before)

    def _of_own(self, values: Sequence[float | None]) -> float | None:
        known = [
            (count, value)
            for count, value in zip(self.held, values, strict=False)
            if count and value is not None
        ]
        samples = sum(count for count, _ in known)
        return sum(count * value for count, value in known) / samples if samples else None


def valued_sweeps(
    turns: Sequence[dict[str, Any]], end: Worth | None, weighed: Container[int]
) -> Iterator[list[ValuedTurn]]:
    """The turns of each weighed sweep whose change is known, in the order in which they happened.

    turns: of one round, with "worth" of the model before, where it is known; end: of the model after the last
    of them. weighed: sweeps whose turns have a worth before and after them.
    """
    worths = [*(turn.get("worth") for turn in turns), end]
    measured = [
        (turn, before, difference(after, before))
        for turn, before, after in zip(turns, worths, worths[1:], strict=False)
        if turn["sweep"] in weighed and before is not None and after is not None
    ]
    for _, sweep in groupby(measured, key=lambda found: found[0]["sweep"]):
        yield [
            ValuedTurn(
                turn["site"],
                turn.get("held", ()),
                before,
                change,
                turn.get("norm", 0.0),
                turn.get("alignment"),
            )
            for turn, before, change in sweep
        ]


def sweep_marginals(sweeps: Iterable[Sequence[ValuedTurn]]) -> list[dict[str, float]]:
    """For each sweep: site -> what its turn added, the mean over the classes."""
    return [{turn.site: balanced(turn.change) for turn in sweep} for sweep in sweeps]


def checked_counts(value: Any) -> list[int | None]:
    """A site's label counts, None for a class that it withholds; nothing for what are no counts."""
    if isinstance(value, list) and all(
        count is None or (type(count) is int and 0 <= count <= MAX_EXAMPLES) for count in value
    ):
        return value
    return []
