"""Sends the model along a chain of sites: one message at a time, each site training the last model."""

from collections.abc import Callable
from dataclasses import dataclass, field

from flwr.serverapp import Grid

from perennial.strategies.round.exchange import Exchange
from perennial.strategies.round.gate import Admitted, Gate
from perennial.strategies.round.request import Arrays, RoundRequest

SLOWEST_POLL = 0.05
"""Seconds between looks at the grid: every one of the many hops waits for its site alone."""


class Silent(Exception):
    """The site did not answer before the deadline, is not connected, or still works on an earlier request."""


@dataclass
class Chain:
    """The server's side of the turns of a chain of sites."""

    exchange: Exchange = field(default_factory=lambda: Exchange(slowest_poll=SLOWEST_POLL))
    sent: int = 0
    """Bytes of the latest turn's request; 0 where none went out."""

    def turn(
        self,
        grid: Grid,
        request: RoundRequest,
        site: str,
        arrays: Arrays,
        *,
        settings: str = "{}",
        held: bool,
        max_update_norm: float | None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Admitted:
        """Have one site train from `arrays`; returns its admitted reply.

        settings: of the request. held: whether the site holds the model of the task before. meanwhile: called
        while it works. max_update_norm: as in Gate. Raises Refused, Rejected or Silent.
        """
        self.sent = 0
        node = request.sites.get(site)
        if node is None or self.exchange.busy(site):
            raise Silent(f"{'not connected' if node is None else 'still at work on an earlier request'}")
        message = request.message(arrays, settings=settings, **request.previous.fields(held=held))
        self.sent = message.tensor_bytes
        gate = Gate(arrays, request.stamp, max_update_norm, max_samples=request.bounds.max_samples)
        # another site's late reply belongs to a model that has moved on
        self.exchange.late.clear()
        for _, reply in self.exchange.run(grid, [(site, node, message)], request.deadline, meanwhile):
            return gate.admit(reply, site)
        raise Silent(f"no answer within {request.deadline:.0f} s")
