"""One exchange with the sites: requests go out together, replies come in as they are ready, until a
deadline."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.serverapp import Grid

from protocol.fields import WireMessage

FIRST_POLL = 0.005
SLOWEST_POLL = 0.5
"""Seconds between looks at the grid: short rounds are noticed at once, long ones cost few looks."""


@dataclass
class Exchange:
    """Remembers which site still owes a reply from an earlier round, so that a late one is recognised and
    named."""

    slowest_poll: float = SLOWEST_POLL
    owed: dict[str, tuple[str, float]] = field(default_factory=dict)
    """message id -> (site, time on the monotonic clock after which nobody waits for it)."""
    bytes_up: int = 0
    bytes_down: int = 0
    """Of the tensors of all that was asked beside training (strategies/ask.py), and of its valid replies."""

    def busy(self, site: str) -> bool:
        """Whether the site still works on an earlier round's request."""
        now = time.monotonic()
        self.owed = {message: entry for message, entry in self.owed.items() if entry[1] > now}
        return any(owner == site for owner, _ in self.owed.values())

    def run(
        self,
        grid: Grid,
        requests: Sequence[tuple[str, int, WireMessage]],
        deadline: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[str, Message]]:
        """Send requests, (site, node id, message) each, and yield (site, reply) as replies come.

        Ends when every request has its reply or after deadline seconds. Late replies of earlier exchanges are
        yielded too, under their site's name; their stamp tells them apart. meanwhile: what to do while the
        sites work.
        """
        # one record for all sites that get the same message, so that a model is serialised once for a round
        records = {
            id(request): request.to_record() for request in {id(r): r for _, _, r in requests}.values()
        }
        messages = [
            Message(records[id(request)], node, request.message_type, ttl=2 * deadline)
            for _, node, request in requests
        ]
        waiting: dict[str, str] = {}
        for (site, _, _), message_id in zip(requests, grid.push_messages(messages), strict=True):
            if message_id:
                waiting[message_id] = site
        meanwhile()
        start = time.monotonic()
        pause = FIRST_POLL
        while waiting and time.monotonic() - start < deadline:
            found = False
            for reply in grid.pull_messages([*waiting, *self.owed]):
                message_id = reply.metadata.reply_to_message_id
                site = waiting.pop(message_id, None) or self.owed.pop(message_id, ("", 0.0))[0]
                if site:
                    found = True
                    yield site, reply
            if found:
                pause = FIRST_POLL
            elif waiting:
                time.sleep(min(pause, max(0.0, deadline - (time.monotonic() - start))))
                pause = min(1.5 * pause, self.slowest_poll)
        patience = time.monotonic() + deadline
        self.owed.update({message_id: (site, patience) for message_id, site in waiting.items()})
