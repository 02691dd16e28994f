"""AdaBest: like FedDyn, but what is remembered decays (Varno et al. 2022, arXiv 2204.13170)."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from perennial.config.strategies import ASKS
from perennial.learning.site_method import LocalTurn
from perennial.strategies.corrected import Corrected, CorrectedMean, CorrectedSite
from perennial.strategies.round.context import Aggregator, RoundContext
from perennial.strategies.round.request import Arrays
from perennial.strategies.sums.exact_sum import is_statistic

MU = 0.1


class AdaBestSite(CorrectedSite):
    """The site half: steps along gradient - h_k; own is h_k, which decays with the rounds that are missed."""

    name = "adabest"

    def start(self, turn: LocalTurn) -> None:
        self.shift = -self.own

    def moved(self, change: Tensor, steps: int) -> Tensor:
        return self.own / self.since - float(self.keys.get("mu", MU)) * change


class AdaBest(Corrected):
    """The server's model is mean - beta (mean of the round before - mean), mean over the sites' models.

    mu: share of its own drift that a site subtracts from its next gradients.
    beta: how far the server continues in the direction in which the mean moved.
    memory is the mean of the round before. beta = mu = 0 is the uniform mean.
    """

    asks = ASKS["adabest"]
    name = AdaBestSite.name
    traits = replace(Corrected.traits, requires="the sites' drift estimates in their steps")

    def __init__(self, mu: float = MU, beta: float = 0.85, **flower: Any) -> None:
        super().__init__(**flower)
        if not 0 <= beta < 1 or not mu >= 0:
            raise ValueError(f"mu, beta: found {mu}, {beta}; allowed mu from 0, beta from 0 and below 1")
        self.mu, self.beta = mu, beta

    def beginning(self, arrays: Arrays) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in arrays.items() if not is_statistic(name)}

    def aggregator(self, ctx: RoundContext) -> Aggregator:
        return DecayedMean(ctx, self)


class DecayedMean(CorrectedMean):
    """The mean, extrapolated in the direction in which it moved since the round before."""

    def __init__(self, ctx: RoundContext, method: AdaBest) -> None:
        super().__init__(ctx, method)
        self._beta = method.beta

    def moved(self) -> dict[str, Tensor]:
        before, mean = self.corrected.memory, self.sum.add_to(self.ctx.reference)
        self.corrected.memory = {name: mean[name] for name in before}
        return {
            name: tensor if is_statistic(name) else tensor - self._beta * (before[name] - tensor)
            for name, tensor in mean.items()
        }
