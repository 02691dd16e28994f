"""The worth of a coalition of sites: the utility of the model that its members alone would have made.

reconstruct: the sites' updates of one round, added (a ring, whose updates telescope) or averaged (all others;
Song et al. 2019, "Profit Allocation for Federated Learning"; Liu et al. 2022, arXiv 2109.02053). A heuristic:
a site's update depends on the model that it was given. replay: the members really train again,
one after the other.
"""

from collections.abc import Callable
from typing import Any

import torch
from flwr.serverapp import Grid
from torch import Tensor

from perennial.protocol.tensors import byte_count
from perennial.strategies.round.context import RoundOutcome
from perennial.strategies.round.gate import Refused, Rejected
from perennial.strategies.round.request import Arrays, RoundRequest
from perennial.strategies.serial_ring.hop_log import Silent
from perennial.strategies.serial_ring.method import SerialRing, frozen_names, moved
from perennial.strategies.valuation.shapley import Value

Utility = Callable[[Arrays], float]


class Reconstructed:
    """A game in which a coalition's model is made of its members' updates of one round or sweep.

    It keeps all updates, so memory grows with the number of sites.
    """

    def __init__(self, start: Arrays) -> None:
        self._start = start
        self._rows: dict[str, tuple[Tensor, float | None]] = {}

    def add(self, site: str, update: Arrays, weight: float | None) -> None:
        """Add one site's update to the game. weight: in the mean; None: updates are added as they are."""
        row = torch.cat([update[name].reshape(-1) for name in self._start])
        self._rows[site] = row, weight

    @property
    def sites(self) -> list[str]:
        """Names of the players, sorted."""
        return sorted(self._rows)

    def value(self, utility: Utility) -> Value:
        """A function from players to the utility of the start with their updates; with none, of the start."""
        start = torch.cat([tensor.reshape(-1) for tensor in self._start.values()])
        updates = torch.stack([self._rows[site][0] for site in self.sites])
        weights = [self._rows[site][1] for site in self.sites]

        def of(members: frozenset[int]) -> float:
            factors = torch.zeros(len(weights), dtype=updates.dtype, device=updates.device)
            known = [weights[m] or 0.0 for m in sorted(members)]
            for member, weight in zip(sorted(members), known, strict=True):
                factors[member] = 1.0 if weights[member] is None else weight / sum(known)
            return utility(self._named(start + factors @ updates))

        return of

    def _named(self, vector: Tensor) -> dict[str, Tensor]:
        parts = vector.split([tensor.numel() for tensor in self._start.values()])
        return {
            name: part.view(tensor.shape)
            for (name, tensor), part in zip(self._start.items(), parts, strict=True)
        }


class Replayed:
    """A game in which coalitions train a ring's first sweep again: in order of names, on the same batches.

    Every coalition's model is trained once, from the one without its last member: 2^N - 1 turns for all of
    them. A member that does not answer passes the model on unchanged. The bytes of the turns
    are added to outcome.
    """

    def __init__(self, ring: SerialRing, grid: Grid, request: RoundRequest, outcome: RoundOutcome) -> None:
        self.sites = sorted(outcome.participants)
        self._ring, self._grid, self._request, self._outcome = ring, grid, request, outcome
        self._models: dict[tuple[int, ...], Arrays] = {(): request.arrays}

    def value(self, utility: Utility) -> Value:
        return lambda members: utility(self._model(tuple(sorted(members))))

    def _model(self, members: tuple[int, ...]) -> Arrays:
        if members not in self._models:
            self._models[members] = self._trained(self._model(members[:-1]), self.sites[members[-1]])
        return self._models[members]

    def _trained(self, arrays: Arrays, site: str) -> Arrays:
        try:
            reply, sent = self._ring.turn(self._grid, self._request, site, arrays, 1, holds_previous=True)
        except (Refused, Rejected, Silent):
            return arrays
        self._outcome.bytes_down += sent
        self._outcome.bytes_up += byte_count(reply.update)
        changed: dict[str, Any] = moved(arrays, reply.update, frozen_names(arrays, self._ring.freeze))
        return changed
