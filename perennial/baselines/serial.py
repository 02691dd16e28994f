"""The base of methods whose round is a chain: each site trains where the one before it left off."""

import time
from dataclasses import replace
from typing import Any

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
            return step.added_to(arrays)
        finally:
            outcome.bytes_down += self._chain.sent
            outcome.seconds += time.monotonic() - start
        return None
