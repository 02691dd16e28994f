"""One round as a chain: the model goes to one site after the other, each going on from the last one's."""

from dataclasses import replace

from flwr.serverapp import Grid
from torch import Tensor

from perennial.strategies.base import Arrays, RoundOutcome, RoundRequest
from perennial.strategies.fedavg import FedAvg
from perennial.strategies.round.gate import Admitted, Rejected


class Serial(FedAvg):
    """Sends the model along the chain; a site that fails is left out and the chain goes on without it."""

    waits_for_busy_sites = False  # the chain goes on without
    _hop: str | None = None

    def fold(self, reply: Admitted) -> None:
        if self._hop is not None and reply.site != self._hop:
            raise Rejected("too late: the chain has gone on without this site")
        super().fold(reply)

    def hop(
        self,
        grid: Grid,
        request: RoundRequest,
        site: str,
        arrays: Arrays,
        outcome: RoundOutcome,
    ) -> dict[str, Tensor] | None:
        """Give one site its turn with arrays; returns the arrays after it, or None when it failed.

        outcome collects who took part, what failed, bytes and seconds.
        """
        self._hop = site
        part = super().train_round(
            grid, replace(request, arrays=arrays, sites={site: request.sites[site]}, quorum=1)
        )
        self._hop = None
        outcome.participants |= part.participants
        outcome.dropped += part.dropped
        outcome.refused += part.refused
        outcome.absent += part.absent
        outcome.bytes_up += part.bytes_up
        outcome.bytes_down += part.bytes_down
        outcome.seconds += part.seconds
        return part.arrays
