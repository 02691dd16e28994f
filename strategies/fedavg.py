"""FedAvg: the mean of the sites' updates, weighted by samples (McMahan et al. 2017, arXiv 1602.05629)."""

from typing import Any

from torch import Tensor

from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.request import Arrays
from perennial.strategies.round.services import Services
from perennial.strategies.secure.masked_round import MaskedRound
from perennial.strategies.sums.exact_sum import ExactSum


class FedAvg(IncrementalStrategy):
    """The mean of the sites' updates, weighted by samples: theta + sum_k n_k update_k / sum_k n_k.

    It takes the memory of one accumulator, and any order of arrival gives the same bits.

    Under privacy modes client_central and client_shared: theta + sum_k update_k / (sites asked), as McMahan
    et al. 2018 (arXiv 1710.06963) bound the sensitivity of the mean: no report and no absence changes the
    weight of the others.
    """

    _fixed_weights = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        """A subclass weighs in its own way: it has no bound on a site's weight unless it gives its own."""
        super().__init_subclass__(**keywords)
        if "largest_weight" not in vars(cls):
            cls.largest_weight = IncrementalStrategy.largest_weight  # type: ignore[method-assign]

    def attach(self, services: Services) -> None:
        self._fixed_weights = services.experiment.privacy.mode in ("client_central", "client_shared")
        if services.sums is not None:
            self.masked = MaskedRound(services.sums, services.judge)

    def begin_round(self) -> None:
        self._sum = ExactSum(self.reference, self.sum_grid(self.largest_sum_weight()))

    def weight(self, reply: Admitted) -> float:
        """How much one update counts; weights are divided by their sum."""
        return 1.0 if self._fixed_weights else float(reply.num_examples)

    def largest_sum_weight(self) -> float:
        """The most that weight() can be."""
        return 1.0 if self._fixed_weights else float(self.bounds.max_samples)

    def fold(self, reply: Admitted) -> None:
        self._sum.add(reply.update, self.weight(reply), reply.norm)

    def finish_round(self) -> dict[str, Tensor]:
        total = self._sum
        del self._sum  # twice the model's memory, which sites that train next may need
        return total.added_to(self.reference, self.asked if self._fixed_weights else None)

    def take_sum(self, total: Arrays, weight: float) -> dict[str, Tensor]:
        scale = 1.0 / (self.asked if self._fixed_weights else weight)
        return {
            name: (total[name].to(tensor.device) * scale + tensor).to(tensor.dtype)
            for name, tensor in self.reference.items()
        }

    def largest_weight(self) -> float:
        """1 / (sites asked)."""
        return 1.0 / self.asked
