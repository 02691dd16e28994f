"""FedAvg: the mean of the sites' updates, weighted by samples (McMahan et al. 2017, arXiv 1602.05629)."""

from collections.abc import Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from perennial.config.rounds import MAX_SAMPLES
from perennial.foundation.errors import ConfigError
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.round.context import Aggregator, RoundContext, RunContext
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.request import Arrays, RoundRequest
from perennial.strategies.sums.exact_sum import ExactSum


class FedAvg(IncrementalStrategy):
    """The mean of the sites' updates, weighted by samples: theta + sum_k n_k update_k / sum_k n_k.

    It takes the memory of one accumulator, and any order of arrival gives the same bits.

    Under privacy modes client_central and client_shared: theta + sum_k update_k / (sites asked), as McMahan
    et al. 2018 (arXiv 1710.06963) bound the sensitivity of the mean: no report and no absence changes the
    weight of the others.
    """

    fixed_weights = False
    """Whether every site counts 1 / (sites asked)."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """A subclass weighs in its own way: it has no bound on a site's weight unless it gives its own."""
        super().__init_subclass__(**keywords)
        if "largest_weight" not in vars(cls):
            cls.largest_weight = IncrementalStrategy.largest_weight  # type: ignore[method-assign]

    def attach(self, run: RunContext) -> None:
        super().attach(run)
        self.fixed_weights = run.experiment.privacy.mode in ("client_central", "client_shared")

    def aggregator(self, ctx: RoundContext) -> Aggregator:
        return WeightedMean(ctx, self)

    def weight(self, reply: Admitted) -> float:
        """The weight of one update; weights are divided by their sum."""
        return 1.0 if self.fixed_weights else float(reply.num_examples)

    def largest_sum_weight(self, request: RoundRequest) -> float:
        """The largest value that weight() can have."""
        return 1.0 if self.fixed_weights else float(MAX_SAMPLES)

    def take_sum(self, ctx: RoundContext, total: Arrays, weight: float) -> dict[str, Tensor]:
        """Make the new global model from a sum of weighted updates, float64. weight: sum of the weights."""
        scale = 1.0 / (ctx.asked if self.fixed_weights else weight)
        return {
            name: (total[name].to(tensor.device) * scale + tensor).to(tensor.dtype)
            for name, tensor in ctx.reference.items()
        }

    def largest_weight(self, asked: int) -> float:
        return 1.0 / asked


class WeightedMean(Aggregator):
    """Adds up updates exactly, each times the weight that its method gives it."""

    def __init__(self, ctx: RoundContext, method: FedAvg) -> None:
        super().__init__(ctx)
        self.method = method
        self.sum = ExactSum(ctx.reference, ctx.sum_grid(method.largest_sum_weight(ctx.request)))

    def add(self, reply: Admitted) -> None:
        self.sum.add(reply.update, self._weigh(reply), reply.norm)

    def add_stack(self, replies: Sequence[Admitted], rows: Tensor) -> bool:
        """Add K replies at once; rows: (K, P), their updates. False, with nothing added, if it cannot."""
        if type(self).add != WeightedMean.add or list(replies[0].update) != list(self.ctx.reference):
            return False
        return self.sum.add_rows(rows, [*map(self._weigh, replies)], [reply.norm for reply in replies])

    def _weigh(self, reply: Admitted) -> float:
        weight = self.method.weight(reply)
        if not isinstance(weight, Real):
            name = type(self.method).__name__
            raise ConfigError(f"{name}.weight(): returned {weight!r:.80}, allowed a number")
        return weight

    def result(self) -> dict[str, Tensor]:
        asked = self.ctx.asked if self.method.fixed_weights else None
        return self.sum.add_to(self.ctx.reference, asked or self._sum_weights())

    def _sum_weights(self) -> float:
        """The sum of the weights. Raises ConfigError if it is 0, by which nothing can be divided."""
        if not (weight := self.sum.weight):
            name = type(self.method).__name__
            raise ConfigError(f"{name}.weight(): returned 0 for every reply, allowed one above 0")
        return weight


class UniformMean(FedAvg):
    """theta + sum_k update_k / K."""

    def weight(self, reply: Admitted) -> float:
        return 1.0

    def largest_sum_weight(self, request: RoundRequest) -> float:
        return 1.0
