"""Coordinate-wise median of the sites' updates (Yin et al. 2018, arXiv 1803.01498)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.round.context import Aggregator, RoundContext
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
        for piece in updates.pieces():
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
