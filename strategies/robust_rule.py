"""The base of the robust rules, which compare all updates of a round and count every site alike.

A rule needs single updates, so they wait on disk (a file of K models in float32) and are read in pieces of
32 MiB: memory does not grow with the number of sites. Rows are in the order of the sites' names, so the order
of arrival changes no bit.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from perennial.foundation.errors import ConfigError, PrivacyError
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.round.context import Aggregator, RoundContext
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.request import Arrays
from perennial.strategies.round.run_context import RunContext
from perennial.strategies.round.traits import Traits
from perennial.strategies.sums.update_file import Piece, UpdateFile


class RobustRule(IncrementalStrategy):
    """theta + rule(updates). dishonest: f, the sites that the rule withstands at most."""

    traits = Traits(compares_updates=True)

    def __init__(self, dishonest: int, max_update_norm: float | None = None, **flower: Any) -> None:
        super().__init__(max_update_norm, **flower)
        if dishonest < 0:
            raise ValueError(f"dishonest: found {dishonest}, allowed 0 and more")
        self.dishonest = dishonest

    # what a rule says

    def least_replies(self) -> int:
        """Fewer updates than this are outside the rule's range."""
        raise NotImplementedError

    def combined(self, ctx: RoundContext, pieces: "Pieces") -> Iterator[tuple[str, int, Tensor]]:
        """The rule's update in pieces: (tensor's name, first value of the flattened tensor, (w,) float64)."""
        raise NotImplementedError

    def moved(self, before: Arrays, after: Arrays) -> None:
        """The round's model has moved, for a rule that remembers how. Default: nothing."""

    # the rest follows

    def attach(self, run: RunContext) -> None:
        """Raises ConfigError when the federation is too small for the rule."""
        sites = run.experiment.data.sites
        asked = (
            self.least_replies() if sites is None else max(1, round(run.experiment.rounds.fraction * sites))
        )
        if asked < self.least_replies():
            raise ConfigError(
                f"strategy.dishonest: found {self.dishonest} with {asked} sites in a round; "
                f"{type(self).__name__} allows that from {self.least_replies()} sites on"
            )
        super().attach(run)

    def largest_weight(self, asked: int) -> float:
        """Raises PrivacyError: the noise at the server is sized for a sum."""
        raise PrivacyError(
            f"strategy: {type(self).__name__} chooses among updates, so one site can change the model by "
            "more than its own weighted update, and noise at the server cannot be sized for it; privacy.mode "
            "client_central goes with fedavg"
        )

    def aggregator(self, ctx: RoundContext) -> Aggregator:
        return ComparedUpdates(ctx, self)


class ComparedUpdates(Aggregator):
    """Keeps the updates of a round on disk, until a rule combines them."""

    def __init__(self, ctx: RoundContext, rule: RobustRule) -> None:
        super().__init__(ctx)
        self._rule, self._file = rule, UpdateFile(ctx.reference)

    def add(self, reply: Admitted) -> None:
        self._file.add(reply.site, reply.update)

    def complete(self) -> int:
        """The updates that are there; 0, with a warning, when they are outside the rule's range."""
        return len(self._file) if self._in_range() else 0

    def result(self) -> dict[str, Tensor]:
        reference = self.ctx.reference
        if not self._in_range():
            return dict(reference)
        flat = {name: torch.empty(like.numel(), dtype=torch.float64) for name, like in reference.items()}
        for name, start, values in self._rule.combined(self.ctx, Pieces(self._file, None)):
            flat[name][start : start + len(values)] = values
        after = {
            name: (tensor.double() + flat[name].view(tensor.shape).to(tensor.device)).to(tensor.dtype)
            for name, tensor in reference.items()
        }
        self._rule.moved(reference, after)
        return after

    def _in_range(self) -> bool:
        found, least = len(self._file), self._rule.least_replies()
        if found < least:
            sentence = (
                f"{type(self._rule).__name__} with {self._rule.dishonest} dishonest sites needs {least} "
                f"updates, and {found} came; the model stays as it is"
            )
            if sentence not in self.ctx.outcome.warnings:
                self.ctx.outcome.warnings.append(sentence)
        return found >= least


class Pieces:
    """The updates of one round, as often as a rule reads them, or means of buckets of them.

    mixing: (B, K) rows to take instead of the K updates; None: the updates themselves.
    """

    def __init__(self, file: UpdateFile, mixing: Tensor | None) -> None:
        self._file, self._mixing = file, mixing

    def __len__(self) -> int:
        return len(self._file) if self._mixing is None else len(self._mixing)

    @property
    def sites(self) -> list[str]:
        """Names of the updates, in the order of rows before any mixing."""
        return self._file.sites

    def __iter__(self) -> Iterator[Piece]:
        for piece in self._file.pieces():
            yield piece if self._mixing is None else replace(piece, rows=self._mixing @ piece.rows)

    def mixed(self, mixing: Tensor) -> "Pieces":
        """Rows mixing @ the updates."""
        return Pieces(self._file, mixing)


def squared_distances(pieces: Iterable[Piece], rows: int) -> Tensor:
    """(n, n) float64 squared Euclidean distances between rows, from one pass over the pieces."""
    total = torch.zeros(rows, rows, dtype=torch.float64)
    for piece in pieces:
        apart = torch.cdist(piece.rows, piece.rows, compute_mode="donot_use_mm_for_euclid_dist")
        total += apart.square_()
    return total


def distances_from(point: Tensor, squared: Tensor) -> Tensor:
    """(n,) distances of every row from the row sum_i point_i row_i.

    point: (n,) coefficients that sum to 1. squared: (n, n) of squared_distances. By
    |x_k - z|^2 = sum_i p_i d_ki^2 - 1/2 sum_ij p_i p_j d_ij^2, so that no further pass is needed.
    """
    towards = squared @ point
    return (towards - 0.5 * (point @ towards)).clamp_(min=0.0).sqrt_()


def drawn_in(squared: Tensor, about: int, most: float) -> tuple[Tensor, Tensor]:
    """Rows farther than `most` from the row `about` are moved towards it, to that distance.

    Returns (n, n) squared distances of the moved rows, and (n, n) coefficients, a row for each moved row, of
    the given ones. A row that is 1e15 times as far as the others would leave no digit of their distances.
    """
    apart = squared[about].sqrt()
    scale = torch.where(apart > most, most / apart, torch.ones_like(apart))
    towards = 0.5 * (squared[about][:, None] + squared[about][None, :] - squared)
    inner = scale[:, None] * towards * scale[None, :]
    lengths = (scale * apart).square()
    moved = (lengths[:, None] + lengths[None, :] - 2 * inner).clamp_(min=0.0).fill_diagonal_(0.0)
    coefficients = torch.diag(scale)
    coefficients[:, about] += 1 - scale
    return moved, coefficients


def weighted(pieces: Pieces, coefficients: Tensor) -> Iterator[tuple[str, int, Tensor]]:
    """sum_i coefficient_i row_i, piece by piece; coefficients: (n,) float64.

    Rows of weight 0 are left out, so that an infinite one of them does no harm.
    """
    used = coefficients.nonzero().flatten()
    for piece in pieces:
        yield piece.name, piece.start, coefficients[used] @ piece.rows[used]


def rounded(coefficients: Tensor, sites: list[str]) -> dict[str, float]:
    """Weights by site for the journal; empty when rows are not single sites."""
    if len(sites) != len(coefficients):
        return {}
    return {site: round(value, 6) for site, value in zip(sites, coefficients.tolist(), strict=True)}


def finite(name: str, value: float | None) -> None:
    """Raises ValueError naming the key unless value is None or a finite number above 0."""
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{name}: found {value}, allowed a finite number above 0")
