"""Krum and multi-Krum: the updates that lie closest to their neighbours.

Blanchard et al. 2017 (arXiv 1703.02757).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from perennial.strategies.robust_rule import Pieces, RobustRule, rounded, squared_distances, weighted
from perennial.strategies.round.context import RoundContext


def krum_scores(squared: Tensor, dishonest: int) -> Tensor:
    """(n,) sums of squared distances to the n - f - 2 nearest others.

    squared: (n, n). Raises ValueError for n < 2 f + 3.
    """
    n = len(squared)
    if n < 2 * dishonest + 3:
        raise ValueError(f"krum: found {n} updates, allowed from 2 * {dishonest} + 3 on")
    others = squared.clone().fill_diagonal_(torch.inf)
    return others.sort(dim=1).values[:, : n - dishonest - 2].sum(dim=1)


class Krum(RobustRule):
    """theta + the update of least score; with `chosen` above 1, multi-Krum, the mean of so many of them.

    Of equal scores the first by site's name counts. Two passes over the updates on disk; O(K^2) a value.
    """

    def __init__(
        self, dishonest: int = 1, chosen: int = 1, max_update_norm: float | None = None, **flower: Any
    ) -> None:
        super().__init__(dishonest, max_update_norm, **flower)
        if chosen < 1:
            raise ValueError(f"chosen: found {chosen}, allowed 1 and more")
        self.chosen = chosen

    def least_replies(self) -> int:
        # choosing more than n - f could choose a dishonest one
        return max(2 * self.dishonest + 3, self.chosen + self.dishonest)

    def combined(self, ctx: RoundContext, pieces: Pieces) -> Iterator[tuple[str, int, Tensor]]:
        scores = krum_scores(squared_distances(pieces, len(pieces)), self.dishonest)
        best = scores.sort(stable=True).indices[: self.chosen]
        coefficients = torch.zeros(len(pieces), dtype=torch.float64)
        coefficients[best] = 1.0 / self.chosen
        if weights := rounded(coefficients, pieces.sites):
            ctx.outcome.details["weights"] = weights
        yield from weighted(pieces, coefficients)
