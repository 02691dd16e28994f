"""FedDyn: bends every site's objective so that the sites' optima agree with the federation's.

Acar et al. 2021 (arXiv 2111.04263).
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from perennial.config.strategies import ASKS
from perennial.learning.site_method import LocalTurn
from perennial.strategies.corrected import Corrected, CorrectedMean, CorrectedSite
from perennial.strategies.round.context import Aggregator, RoundContext
from perennial.strategies.round.gate import Admitted
from perennial.strategies.sums.exact_sum import ExactSum, is_statistic

ALPHA = 0.1


class FedDynSite(CorrectedSite):
    """The site half: steps along gradient - h_k + alpha (parameters - received); own is h_k."""

    name = "feddyn"

    def start(self, turn: LocalTurn) -> None:
        self.shift, self.pull = -self.own, self._alpha

    def moved(self, change: Tensor, steps: int) -> Tensor:
        return self.own - self._alpha * change

    @property
    def _alpha(self) -> float:
        return float(self.keys.get("alpha", ALPHA))


class FedDyn(Corrected):
    """mean of the sites' models + (1/N) sum of all updates ever, N sites in the population.

    alpha: strength of the sites' dynamic regulariser. memory is the server's h divided by alpha. It never
    decays, so a site that leaves for good keeps pulling: the method is known to diverge then.
    """

    asks = ASKS["feddyn"]
    name = FedDynSite.name
    traits = replace(Corrected.traits, requires="the dynamic regulariser in the sites' steps")

    def __init__(self, alpha: float = ALPHA, **flower: Any) -> None:
        super().__init__(**flower)
        if not alpha > 0:
            raise ValueError(f"alpha: found {alpha}, allowed above 0")
        self.alpha = alpha

    def aggregator(self, ctx: RoundContext) -> Aggregator:
        return DynamicMean(ctx, self)


class DynamicMean(CorrectedMean):
    """The mean, pulled on by the sum of all updates that sites have ever made."""

    stand_ins: ExactSum | None = None

    def add(self, reply: Admitted) -> None:
        super().add(reply)
        if reply.stand_in:
            # the absent site's own vector has not moved, and the server's must agree with it
            self.stand_ins = self.stand_ins or ExactSum(self.ctx.reference, self.ctx.sum_grid())
            self.stand_ins.add(reply.update, 1.0, reply.norm)

    def moved(self) -> dict[str, Tensor]:
        total = self.sum.value()
        mean = self.sum.add_to(self.ctx.reference)
        not_theirs = self.stand_ins.value() if self.stand_ins is not None else {}
        memory = self.corrected.memory
        for name, kept in memory.items():
            own = total[name] - not_theirs[name] if not_theirs else total[name]
            kept.sub_((own / len(self.corrected.population)).to(kept.dtype))
        return {
            name: tensor if is_statistic(name) else tensor - memory[name] for name, tensor in mean.items()
        }
