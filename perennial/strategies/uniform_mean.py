"""The mean of the sites' updates in which every site counts the same, whatever its number of samples.

The baseline to hold beside any rule that ignores sample counts: what such a rule gains over FedAvg may be
nothing but this.
"""

from perennial.strategies.fedavg import FedAvg
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.request import RoundRequest


class UniformMean(FedAvg):
    """theta + sum_k update_k / K."""

    def weight(self, reply: Admitted) -> float:
        return 1.0

    def largest_sum_weight(self, request: RoundRequest) -> float:
        return 1.0
