"""Cyclic weight transfer: one site trains the model after the other.

Chang et al. 2018 (JAMIA 25(8)); cyclic institutional incremental learning of Sheller et al. 2019.
"""

from collections.abc import Iterable, Mapping

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from torch import Tensor

from perennial.baselines.serial import Serial
from perennial.strategies.round.context import RoundOutcome
from perennial.strategies.round.request import RoundRequest


class CyclicWeightTransfer(Serial):
    """One round is one cycle through the sites in their canonical order.

    learner.epochs is the frequency of transfer, tasks.rounds the number of cycles; one cycle of many epochs
    is institutional incremental learning. Under Flower's own start() a round is one hop.
    """

    def train_round(self, grid: Grid, request: RoundRequest) -> RoundOutcome:
        outcome = RoundOutcome()
        arrays: Mapping[str, Tensor] = request.arrays
        for site in request.sites:
            arrays = self.hop(grid, request, site, arrays, outcome) or arrays
        if len(outcome.participants) >= request.quorum:
            outcome.arrays = dict(arrays)
        return outcome

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = sorted(
            super().configure_train(server_round, arrays, config, grid), key=lambda m: m.metadata.dst_node_id
        )
        return messages[(server_round - 1) % len(messages) :][:1] if messages else []
