"""Centred clipping: every update is clipped around the last aggregate.

Karimireddy et al. 2021 (arXiv 2012.10333).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from perennial.strategies.geometric_median import FARTHEST
from perennial.strategies.robust_rule import (
    Pieces,
    RobustRule,
    distances_from,
    drawn_in,
    finite,
    rounded,
    weighted,
)
from perennial.strategies.round.context import RoundContext
from perennial.strategies.round.request import Arrays, TaskStart
from perennial.strategies.sums.parameters import prefixed, unprefixed


def clipped_mean(squared: Tensor, radius: float | None, iterations: int) -> Tensor:
    """(n + 1,) coefficients of n rows and, last, of the centre: v <- v + mean of clip(row - v, radius).

    squared: (n + 1, n + 1) squared distances, the centre last. radius None: the median distance of the rows
    from v, anew in each iteration.
    """
    n = len(squared) - 1
    point = torch.zeros(n + 1, dtype=torch.float64)
    point[-1] = 1.0
    median = float(squared[-1, :-1].median().sqrt()) if radius is None else radius
    squared, origin = drawn_in(squared, n, FARTHEST * median)
    for _ in range(iterations):
        apart = distances_from(point, squared)[:-1]
        ordered = apart.sort().values
        most = float(ordered[(n - 1) // 2] + ordered[n // 2]) / 2 if radius is None else radius
        kept = torch.where(apart > most, most / apart, torch.ones_like(apart)) / n
        point = point * (1 - float(kept.sum()))
        point[:-1] += kept
    return point @ origin


class CentredClipping(RobustRule):
    """theta + v, where v is the last round's update of the model, moved by the clipped differences from it.

    radius: None takes the median distance from the centre. The centre is 0 in a task's first round, and
    where the rounds are of means of buckets. Two passes over the updates on disk; O(K^2) a value.
    """

    def __init__(
        self,
        radius: float | None = None,
        iterations: int = 1,
        max_update_norm: float | None = None,
        **flower: Any,
    ) -> None:
        super().__init__(0, max_update_norm, **flower)
        finite("radius", radius)
        if iterations < 1:
            raise ValueError(f"iterations: found {iterations}, allowed 1 and more")
        self.radius, self.iterations = radius, iterations
        self._centre: dict[str, Tensor] = {}

    def least_replies(self) -> int:
        return 1

    def begin_task(self, task: TaskStart) -> None:
        self._centre = {}

    def combined(self, ctx: RoundContext, pieces: Pieces) -> Iterator[tuple[str, int, Tensor]]:
        coefficients = clipped_mean(self._distances(pieces), self.radius, self.iterations)
        if weights := rounded(coefficients[:-1], pieces.sites):
            ctx.outcome.details["weights"] = weights
        for name, start, values in weighted(pieces, coefficients[:-1]):
            if self._centre:
                before = self._centre[name].reshape(-1)[start : start + len(values)]
                values.add_(before, alpha=float(coefficients[-1]))
            yield name, start, values

    def moved(self, before: Arrays, after: Arrays) -> None:
        self._centre = {
            name: (after[name].double() - tensor.double()).cpu() for name, tensor in before.items()
        }

    def _distances(self, pieces: Pieces) -> Tensor:
        """(n + 1, n + 1) squared distances of the rows and, last, the centre."""
        n = len(pieces)
        total = torch.zeros(n + 1, n + 1, dtype=torch.float64)
        for piece in pieces:
            width = piece.stop - piece.start
            centre = torch.zeros(1, width, dtype=torch.float64)
            if self._centre:
                centre[0] = self._centre[piece.name].reshape(-1)[piece.start : piece.stop]
            rows = torch.cat([piece.rows, centre])
            total += torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square_()
        return total

    def state_dict(self) -> dict[str, Any]:
        return prefixed("centre", self._centre)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._centre = unprefixed("centre", state)
