"""Replies of a run's first round, which count once all of them are there: they set their own bounds."""

from collections.abc import Iterator
from dataclasses import replace

from perennial.protocol.tensors import Tensors
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.request import Arrays
from perennial.strategies.round.running_bounds import RunningBounds
from perennial.strategies.sums.update_file import UpdateFile


class WaitingReplies:
    """Keeps the updates of one round on disk until no more come, and then gives them."""

    def __init__(self, running: RunningBounds, reference: Arrays) -> None:
        self._running = running
        self._replies: dict[str, Admitted] = {}
        self._updates = UpdateFile(reference)

    @classmethod
    def needed(cls, running: RunningBounds | None, reference: Arrays) -> "WaitingReplies | None":
        """For a run's first round, which has no former one to take bounds from; None elsewhere."""
        return cls(running, reference) if running is not None and running.waiting else None

    def add(self, reply: Admitted) -> None:
        """Keep one reply. Raises OSError when the disk is full."""
        self._updates.add(reply.site, reply.update)
        self._replies[reply.site] = replace(reply, update={})

    def counting(self) -> Iterator[Admitted]:
        """All replies, in the order of the sites' names."""
        self._running.see_all(self._replies.values())
        for site, update in self._updates:
            yield replace(self._replies[site], update=Tensors(update))
