"""The worth of a coalition of sites: the utility of the model that its members alone would have made.

reconstruct: the sites' updates of one round, added (a ring, whose updates telescope) or averaged (all others;
Song et al. 2019, "Profit Allocation for Federated Learning"; Liu et al. 2022, arXiv 2109.02053). A heuristic:
a site's update depends on the model that it was given.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from perennial.strategies.round.request import Arrays
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
