"""Krum, multi-Krum and the trimmed mean: robust rules that compare the sites' updates.

Blanchard et al. 2017 (arXiv 1703.02757) and Yin et al. 2018 (arXiv 1803.01498). Every site counts alike,
whatever it claims, and no order of arrival changes a bit. docs/robustness.md says what these rules withstand.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from perennial.foundation.errors import ConfigError
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.round.context import Aggregator, RoundContext, RunContext
from perennial.strategies.round.gate import Admitted
from perennial.strategies.sums.update_file import UpdateFile


class Median(IncrementalStrategy):
    """theta + the median of each value over the sites; the mean of the two in the middle of an even number.

    Every site counts alike, whatever it claims; fewer than half of them can be dishonest. The updates of a
    round wait on disk and are read once, in pieces of 32 MiB, so that memory does not grow with their number;
    O(K log K) a value.
    """

    def combined(self, updates: UpdateFile) -> Iterator[tuple[str, int, Tensor]]:
        """Yield the median update in pieces: (tensor's name, index of its first flat value, (w,) float64)."""
        low, high = (len(updates) - 1) // 2, len(updates) // 2
        for piece in updates.read_pieces():
            ordered = piece.rows.sort(dim=0).values
            yield piece.name, piece.start, (ordered[low] + ordered[high]) / 2

    def aggregator(self, ctx: RoundContext) -> Aggregator:
        return ComparedUpdates(ctx, self)


class ComparedUpdates(Aggregator):
    """Keeps a round's updates on disk until all are there; then combines them in order of names."""

    def __init__(self, ctx: RoundContext, rule: Median) -> None:
        super().__init__(ctx)
        self._rule, self._file = rule, UpdateFile(ctx.reference)

    def add(self, reply: Admitted) -> None:
        self._file.add(reply.site, reply.update)

    def complete(self) -> int:
        return len(self._file)

    def result(self) -> dict[str, Tensor]:
        reference = self.ctx.reference
        flat = {name: torch.empty(like.numel(), dtype=torch.float64) for name, like in reference.items()}
        for name, start, values in self._rule.combined(self._file):
            flat[name][start : start + len(values)] = values
        return {
            name: (tensor.double() + flat[name].view(tensor.shape).to(tensor.device)).to(tensor.dtype)
            for name, tensor in reference.items()
        }


class MultiKrum(Median):
    """theta + the mean of the `keep` updates whose K - byzantine - 2 nearest updates are nearest.

    byzantine: how many of the K sites may be dishonest; the published guarantee needs K >= 2 byzantine + 3.
    Updates of equal scores are taken in the order of the sites' names.
    """

    def __init__(self, byzantine: int = 1, keep: int = 2, **flower: Any) -> None:
        super().__init__(**flower)
        if byzantine < 0:
            raise ValueError(f"byzantine: found {byzantine}, allowed 0 or more")
        if keep < 1:
            raise ValueError(f"keep: found {keep}, allowed 1 or more")
        self.byzantine, self.keep = byzantine, keep

    def attach(self, run: RunContext) -> None:
        """Begin a run. Raises ConfigError for fewer sites than the published guarantee needs."""
        super().attach(run)
        sites, needed = run.experiment.data.sites, 2 * self.byzantine + 3
        if sites is not None and sites < needed:
            raise ConfigError(
                f"strategy.byzantine: found {self.byzantine} with {sites} sites; allowed up to "
                f"{max(0, (sites - 3) // 2)}, because Krum needs 2 byzantine + 3 sites"
            )

    def combined(self, updates: UpdateFile) -> Iterator[tuple[str, int, Tensor]]:
        chosen = self._select_nearest(updates)
        for piece in updates.read_pieces():
            yield piece.name, piece.start, piece.rows[chosen].mean(dim=0)

    def _select_nearest(self, updates: UpdateFile) -> Tensor:
        """Indices of the updates to keep, (keep,)."""
        count = len(updates)
        apart = torch.zeros(count, count, dtype=torch.float64)
        for piece in updates.read_pieces():
            for row in range(count):
                apart[row] += (piece.rows - piece.rows[row]).square().sum(dim=1)
        apart.fill_diagonal_(torch.inf)
        near = min(max(1, count - self.byzantine - 2), max(1, count - 1))
        scores = apart.sort(dim=1).values[:, :near].sum(dim=1)
        return scores.sort(stable=True).indices[: self.keep].sort().values


class Krum(MultiKrum):
    """theta + the one update whose K - byzantine - 2 nearest updates are nearest."""

    def __init__(self, byzantine: int = 1, **flower: Any) -> None:
        super().__init__(byzantine, 1, **flower)


class TrimmedMean(Median):
    """theta + the mean of each value without its largest and smallest, floor(share K) at either end."""

    def __init__(self, share: float = 0.2, **flower: Any) -> None:
        super().__init__(**flower)
        if not 0 <= share < 0.5:
            raise ValueError(f"share: found {share}, allowed 0 to below 0.5")
        self.share = share

    def combined(self, updates: UpdateFile) -> Iterator[tuple[str, int, Tensor]]:
        cut = int(self.share * len(updates) + 1e-9)
        for piece in updates.read_pieces():
            ordered = piece.rows.sort(dim=0).values
            yield piece.name, piece.start, ordered[cut : len(updates) - cut].mean(dim=0)
