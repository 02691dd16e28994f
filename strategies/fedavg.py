"""FedAvg: the mean of the sites' updates, weighted by samples (McMahan et al. 2017, arXiv 1602.05629)."""

from torch import Tensor

from strategies.base import IncrementalStrategy
from strategies.exact_sum import ExactSum
from strategies.gate import Admitted


class FedAvg(IncrementalStrategy):
    """theta + sum_k n_k update_k / sum_k n_k, in the memory of one accumulator and in any order of
    arrival."""

    def begin_round(self) -> None:
        self._sum = ExactSum(self.reference)

    def weight(self, reply: Admitted) -> float:
        """How much one update counts; weights are divided by their sum."""
        return float(reply.num_examples)

    def fold(self, reply: Admitted) -> None:
        self._sum.add(reply.update, self.weight(reply), reply.norm)

    def finish_round(self) -> dict[str, Tensor]:
        return self._sum.added_to(self.reference)
