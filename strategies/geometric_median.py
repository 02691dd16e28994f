"""The geometric median of the sites' updates (Pillutla et al. 2022, arXiv 1912.13445)."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from perennial.strategies.robust_rule import (
    Pieces,
    RobustRule,
    distances_from,
    drawn_in,
    finite,
    rounded,
    squared_distances,
    weighted,
)
from perennial.strategies.round.context import RoundContext

TOLERANCE = 1e-10
FARTHEST = 1e3
"""Rows farther from the middle one than so many median distances are moved in to there: they pull in the same
direction, to one part in a thousand."""


def weiszfeld(squared: Tensor, iterations: int, smoothing: float) -> Tensor:
    """(n,) coefficients, summing to 1, of the point with the least sum of distances to the rows.

    squared: (n, n) squared distances between rows.
    smoothing: distances count as at least this part of the median distance, so that a row on the point
    itself does not divide by 0.
    Stops early when no coefficient moves by more than 1e-10.
    """
    middle = int(squared.median(dim=1).values.argmin())
    median = float(squared[middle].median().sqrt())
    if not median:
        # more than half of the rows are one and the same
        return torch.nn.functional.one_hot(torch.tensor(middle), len(squared)).double()
    squared, origin = drawn_in(squared, middle, FARTHEST * median)
    point = torch.full((len(squared),), 1.0 / len(squared), dtype=torch.float64)
    for _ in range(iterations):
        apart = distances_from(point, squared)
        pull = apart.clamp(min=smoothing * median).reciprocal()
        moved = pull / pull.sum()
        still = float((moved - point).abs().max()) <= TOLERANCE
        point = moved
        if still:
            break
    return point @ origin


class GeometricMedian(RobustRule):
    """theta + the point with the least sum of distances to the updates, by smoothed Weiszfeld iterations.

    Fewer than half of the sites can be dishonest. Two passes over the updates on disk; O(K^2) a value: the
    iterations need the distances between updates alone.
    """

    def __init__(
        self,
        iterations: int = 1000,
        smoothing: float = 1e-6,
        max_update_norm: float | None = None,
        **flower: Any,
    ) -> None:
        super().__init__(0, max_update_norm, **flower)
        if iterations < 1:
            raise ValueError(f"iterations: found {iterations}, allowed 1 and more")
        finite("smoothing", smoothing)
        self.iterations, self.smoothing = iterations, smoothing

    def least_replies(self) -> int:
        return 1

    def combined(self, ctx: RoundContext, pieces: Pieces) -> Iterator[tuple[str, int, Tensor]]:
        squared = squared_distances(pieces, len(pieces))
        coefficients = weiszfeld(squared, self.iterations, self.smoothing)
        if weights := rounded(coefficients, pieces.sites):
            ctx.outcome.details["weights"] = weights
        yield from weighted(pieces, coefficients)
