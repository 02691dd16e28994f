"""Cyclic weight transfer: one site trains the model after the other.

Chang et al. 2018 (JAMIA 25(8)); cyclic institutional incremental learning of Sheller et al. 2019.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from torch import Tensor

from perennial.models.sum_grid import SumGrid
from perennial.strategies.fedavg import FedAvg
from perennial.strategies.round.context import RoundOutcome
from perennial.strategies.round.gate import Admitted, Refused, Rejected
from perennial.strategies.round.request import Arrays, RoundRequest, Traits
from perennial.strategies.serial_ring.hop_log import Chain, Silent
from perennial.strategies.sums.exact_sum import ExactSum


class Serial(FedAvg):
    """Sends the model along the chain; a site that fails is left out and the chain goes on without it."""

    # the chain goes on without a site that is busy
    traits = Traits(aggregates_in_parallel=False, waits_for_busy_sites=False)

    def __init__(self, **flower: Any) -> None:
        super().__init__(**flower)
        self._chain = Chain()

    def admit_hop(self, reply: Admitted) -> None:
        """Called with each reply; a method overrides it to keep more than the model. Does nothing here."""

    def hop(
        self, grid: Grid, request: RoundRequest, site: str, arrays: Arrays, outcome: RoundOutcome
    ) -> dict[str, Tensor] | None:
        """Have one site train from `arrays`; returns its model, or None when it failed.

        outcome collects who took part, what failed, bytes and seconds.
        """
        start = time.monotonic()
        try:
            reply = self._chain.turn(
                grid,
                request,
                site,
                arrays,
                held=site in request.previous.holders,
                max_update_norm=request.max_update_norm,
            )
            alone = replace(request, sites={site: request.sites[site]})
            step = ExactSum(arrays, SumGrid(max(1, alone.most_replies), self.largest_sum_weight(request)))
            step.add(reply.update, self.weight(reply), reply.norm)
            self.admit_hop(reply)
            for observer in request.observers:
                observer(reply, arrays, 1)
        except Refused as refusal:
            outcome.refused.append((site, str(refusal)))
        except (Rejected, OverflowError) as rejection:
            outcome.dropped.append((site, str(rejection)))
        except Silent:
            outcome.absent.append(site)
        else:
            outcome.take(reply)
            return step.add_to(arrays)
        finally:
            outcome.bytes_down += self._chain.sent
            outcome.seconds += time.monotonic() - start
        return None


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
