"""The worth of coalitions under a closed form: each one's model is solved from its sums alone.

Nothing is trained and no site is asked, so these are the models that the coalitions would have had, and
Shapley values and leave-one-out are exact where every coalition is solved for.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from perennial.foundation.errors import ConfigError, DataError
from perennial.learning.analytic.cross_site import LAMBDAS, added, error_of_all
from perennial.learning.analytic.solve import LinearHead, Sums, best_by_gcv, ridge, solve
from perennial.learning.analytic.statistics import Statistics
from perennial.strategies.analytic.cross_site import sums_by_site
from perennial.strategies.analytic.kept import KeptSums
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.round.request import Arrays
from perennial.strategies.valuation.shapley import Value

MOST_SECONDS = 3600.0
PROBE = 512
"""Features of the solve that is timed for the estimate."""
IN_MEMORY = 2_000_000_000
"""Bytes of sites' sums that are held at once; beyond, they are read from the disk for each coalition."""


class Solved:
    """A game in which a coalition's model is solved from the sums that its members have given so far."""

    def __init__(self, sums: KeptSums, classes: int, head: Callable[[Sums], LinearHead]) -> None:
        """classes: number known so far. head: solves sums, with the shrinkage that the run's own head has."""
        self._sums, self._classes, self._head = sums, range(classes), head
        self.sites = sums.sites
        self._held: dict[str, Statistics] = {}

    def value(self, utility: Callable[[dict[str, Tensor]], float]) -> Value:
        """A function from players to the utility of their model; 0 if no model follows from their samples."""

        def of(members: frozenset[int]) -> float:
            total = None
            for member in sorted(members):
                own = self._own(self.sites[member])
                total = own if total is None else total + own
            if total is None:
                return 0.0
            try:
                return utility(self._head(Sums.of(total)).tensors())
            except DataError:
                return 0.0

        return of

    def _own(self, site: str) -> Statistics:
        if site in self._held:
            return self._held[site]
        total = self._sums.of_site(site, self._classes)
        assert total is not None
        if len(self._held) * total.gram.nbytes < IN_MEMORY:
            self._held[site] = total
        return total


class JudgedBySites:
    """Games in which each site judges coalitions by its own sums, with heads that leave these out.

    Heads are ridge, whatever the run's own, with one shrinkage that cross-validation chooses from the sums of
    all; features beyond 1,024 are projected. The worth of a coalition for a site is 1 - the squared error of
    the head without that site's own sums, summed over all classes; it is 0 for no members.
    """

    def __init__(self, kept: KeptSums, classes: int) -> None:
        """Read the sums. Raises DataError if there are none; StateError if a site's own were not kept."""
        self._sums = sums_by_site(kept, range(classes))
        self.sites = sorted(self._sums)
        self._shrinkage = best_by_gcv(added(list(self._sums.values())), LAMBDAS)
        self._errors: dict[frozenset[int], list[float]] = {frozenset(): [1.0] * len(self.sites)}

    def values(self) -> list[Value]:
        """For each site, a function from players to the worth of their model on that site's records."""
        return [partial(self._worth, judge) for judge in range(len(self.sites))]

    def _worth(self, judge: int, members: frozenset[int]) -> float:
        others = members - {judge}
        if others not in self._errors:
            total = added([self._sums[self.sites[member]] for member in sorted(others)])
            head = ridge(total, self._shrinkage)
            self._errors[others] = [
                error_of_all(head, self._sums[site], total.counts > 0) for site in self.sites
            ]
        return 1 - self._errors[others][judge]


def require_closed_form(
    has_one: bool, base: IncrementalStrategy, estimator: str, utility: str | None
) -> None:
    """Raise ValueError if coalitions of this base cannot be solved for, or not with this utility."""
    if not has_one or estimator != "solve":
        raise ValueError(
            f"estimator: found {estimator!r} with base {type(base).__name__}; 'solve' goes with analytic, "
            "which sends no updates, and with nothing else"
        )
    if utility == "probability":
        raise ValueError("utility: closed-form scores are no probabilities; allowed accuracy")


def leave_one_out(players: int, value: Value) -> list[float]:
    """For each player, the value of all players minus that of all others."""
    everybody = frozenset(range(players))
    whole = value(everybody)
    return [whole - value(everybody - {player}) for player in range(players)]


def require_affordable(solves: int, width: int) -> None:
    """Raise ConfigError if so many solves of `width` features would take more than an hour, as estimated.

    The estimate is a timed solve of few features, times the cube of the ratio.
    """
    matrix = torch.eye(PROBE, dtype=torch.float64) * 2 + 1 / PROBE
    start = time.perf_counter()
    solve(matrix, torch.ones(PROBE, 10, dtype=torch.float64))
    seconds = solves * (time.perf_counter() - start) * (width / PROBE) ** 3
    if seconds > MOST_SECONDS:
        raise ConfigError(
            f"strategy: {solves} solves of {width} features would take about {seconds / 3600:.1f} h; allowed "
            "an hour: fewer sites, features, or permutations"
        )


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
