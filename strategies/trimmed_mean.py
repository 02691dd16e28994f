"""Coordinate-wise trimmed mean of the sites' updates (Yin et al. 2018, arXiv 1803.01498)."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from perennial.strategies.robust_rule import Pieces, RobustRule
from perennial.strategies.round.context import RoundContext


class TrimmedMean(RobustRule):
    """theta + the mean of each value over the sites without the `dishonest` largest and smallest ones.

    Refused for 2 f >= n. One pass over the updates on disk; O(K log K) a value.
    """

    def __init__(self, dishonest: int = 1, max_update_norm: float | None = None, **flower: Any) -> None:
        super().__init__(dishonest, max_update_norm, **flower)

    def least_replies(self) -> int:
        return 2 * self.dishonest + 1

    def combined(self, ctx: RoundContext, pieces: Pieces) -> Iterator[tuple[str, int, Tensor]]:
        for piece in pieces:
            ordered = piece.rows.sort(dim=0).values
            kept = ordered[self.dishonest : len(pieces) - self.dishonest]
            yield piece.name, piece.start, kept.mean(dim=0)
