"""Coordinate-wise median of the sites' updates (Yin et al. 2018, arXiv 1803.01498)."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from perennial.strategies.robust_rule import Pieces, RobustRule
from perennial.strategies.round.context import RoundContext


class Median(RobustRule):
    """theta + the median of each value over the sites; the mean of the two in the middle of an even number.

    Fewer than half of the sites can be dishonest. One pass over the updates on disk; O(K log K) a value.
    """

    def __init__(self, max_update_norm: float | None = None, **flower: Any) -> None:
        super().__init__(0, max_update_norm, **flower)

    def least_replies(self) -> int:
        return 1

    def combined(self, ctx: RoundContext, pieces: Pieces) -> Iterator[tuple[str, int, Tensor]]:
        low, high = (len(pieces) - 1) // 2, len(pieces) // 2
        for piece in pieces:
            ordered = piece.rows.sort(dim=0).values
            yield piece.name, piece.start, (ordered[low] + ordered[high]) / 2
