"""Requests for sums that sites may answer days later; they are renewed before their lifetime ends.

A reply counts whenever it comes, also in a later task: it is compared with the request that it answers.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.serverapp import Grid

from perennial.foundation.errors import ProtocolError
from perennial.protocol.messages import StatisticsReply, StatisticsRequest
from perennial.strategies.round.exchange import FIRST_POLL, Exchange
from perennial.strategies.round.queries import checked

clock: Callable[[], float] = time.monotonic
LIFETIMES = 2
"""How many deadlines a request lives; it is renewed after half of that."""


@dataclass(frozen=True)
class Pending:
    """One request without a reply. sent: wall-clock time. lifetime: seconds."""

    site: str
    request: StatisticsRequest
    sent: float
    lifetime: float

    @property
    def fresh(self) -> bool:
        """Whether the site can still be expected to receive it."""
        return clock() - self.sent < self.lifetime / 2


@dataclass
class PendingRequests:
    """Requests without a reply so far, by message id.

    They are not part of a checkpoint: a server that was resumed asks again, and a site sends
    the same sums again.
    """

    pending: dict[str, Pending] = field(default_factory=dict)

    def asked(self, task: int, site: str) -> bool:
        """Whether a request for a site's sums of a task is waiting for the site."""
        return any(
            entry.site == site and entry.request.of_task == task and entry.fresh
            for entry in self.pending.values()
        )

    def ask(
        self,
        grid: Grid,
        exchange: Exchange,
        site: str,
        node: int,
        request: StatisticsRequest,
        deadline: float,
    ) -> None:
        """Send a request, or renew it. deadline: of a round, in seconds."""
        lifetime = LIFETIMES * deadline
        message = Message(request.record, node, request.message_type, ttl=lifetime)
        exchange.bytes_down += request.tensor_bytes
        for message_id in grid.push_messages([message]):
            if message_id:
                self.pending[message_id] = Pending(site, request, clock(), lifetime)

    def arrived(
        self,
        grid: Grid,
        exchange: Exchange,
        deadline: float,
        check: Callable[[Pending, StatisticsReply], None],
        dropped: Callable[[str, str], None],
    ) -> Iterator[tuple[str, StatisticsReply]]:
        """Yield (site, reply) of all that has come, after waiting for the first one up to the deadline.

        check: raises ProtocolError when the content is not acceptable. dropped: called with (site, reason).
        """
        start, pause, some = clock(), FIRST_POLL, False
        while self.pending and (some or clock() - start < deadline):
            replies = list(grid.pull_messages([*self.pending]))
            for message in replies:
                entry = self.pending.pop(message.metadata.reply_to_message_id, None)
                if entry is None:
                    continue
                some = True
                try:
                    reply = checked(message, (StatisticsReply,), [entry.request])
                    check(entry, reply)
                except ProtocolError as error:
                    dropped(entry.site, str(error))
                else:
                    exchange.bytes_up += reply.tensor_bytes
                    yield entry.site, reply
            if not replies and some:
                return
            if not replies:
                self._forget_dead()
                time.sleep(min(pause, max(0.0, deadline - (clock() - start))))
                pause = min(1.5 * pause, exchange.slowest_poll)

    def _forget_dead(self) -> None:
        now = clock()
        self.pending = {key: e for key, e in self.pending.items() if now - e.sent < e.lifetime}
