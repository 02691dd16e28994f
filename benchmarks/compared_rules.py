"""Rules that the product does not have, for the table that says why: the server's own median beside them.

Each makes one step of all updates of a round, in memory. They are plug-ins (`strategy: {name:
benchmarks.compared_rules:Krum}`), and an attacker in benchmarks/adaptive.py runs them as they are.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from perennial.foundation.streams import stream
from perennial.strategies.krum import Median
from perennial.strategies.round.request import TaskStart
from perennial.strategies.sums.update_file import UpdateFile


class Compared(Median):
    """theta + a step made of all updates."""

    def step(self, rows: Tensor) -> Tensor:
        """rows: (K, D) float64 updates, flattened. Returns (D,)."""
        raise NotImplementedError

    def combined(self, updates: UpdateFile) -> Iterator[tuple[str, int, Tensor]]:
        pieces = list(updates.read_pieces())
        step, start = self.step(torch.cat([piece.rows for piece in pieces], dim=1)), 0
        for piece in pieces:
            width = piece.rows.shape[1]
            yield piece.name, piece.start, step[start : start + width]
            start += width


class TrimmedMean(Compared):
    """The mean of each value without the largest and the smallest (Yin et al. 2018, arXiv 1803.01498)."""

    def step(self, rows: Tensor) -> Tensor:
        return rows.sort(dim=0).values[1:-1].mean(dim=0)


class Krum(Compared):
    """Multi-Krum: the mean of the two updates nearest to their n - 3 neighbours (Blanchard et al. 2017)."""

    def step(self, rows: Tensor) -> Tensor:
        apart = torch.cdist(rows, rows).square().fill_diagonal_(torch.inf)
        scores = apart.sort(dim=1).values[:, : len(rows) - 3].sum(dim=1)
        return rows[scores.sort(stable=True).indices[:2]].mean(dim=0)


class GeometricMedian(Compared):
    """The point with the least sum of distances (Pillutla et al. 2022, arXiv 1912.13445)."""

    def step(self, rows: Tensor) -> Tensor:
        point = rows.median(dim=0).values
        for _ in range(100):
            pull = (rows - point).norm(dim=1).clamp(min=1e-9).reciprocal()
            moved = (pull / pull.sum()) @ rows
            if float((moved - point).norm()) <= 1e-8 * float(point.norm()):
                break
            point = moved
        return point


class CentredClipping(Compared):
    """The last step, moved by the differences from it, clipped to their median length.

    Karimireddy et al. 2021 (arXiv 2012.10333). The first step of a task starts at 0.
    """

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._centre: Tensor | None = None

    def begin_task(self, task: TaskStart) -> None:
        self._centre = None

    def step(self, rows: Tensor) -> Tensor:
        centre = torch.zeros(rows.shape[1], dtype=torch.float64) if self._centre is None else self._centre
        apart = rows - centre
        lengths = apart.norm(dim=1)
        kept = (lengths.median() / lengths.clamp(min=1e-12)).clamp(max=1.0)
        self._centre = centre + (kept[:, None] * apart).mean(dim=0)
        return self._centre


class Bucketing(Compared):
    """The median of means of pairs, dealt anew in each round (Karimireddy et al. 2022, arXiv 2006.09365)."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._rounds = 0

    def step(self, rows: Tensor) -> Tensor:
        self._rounds += 1
        # an attacker's copy of the server is in no run, and does not know the order
        seed = self.run.secret_seed if self.attached else 0
        order = torch.from_numpy(stream(seed, "bucketing", self._rounds).permutation(len(rows)))
        buckets = torch.stack([rows[pair].mean(dim=0) for pair in order.split(2)]).sort(dim=0).values
        low, high = (len(buckets) - 1) // 2, len(buckets) // 2
        return (buckets[low] + buckets[high]) / 2
