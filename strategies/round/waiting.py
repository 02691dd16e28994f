"""Replies of a round that count once all of them are there, because they are judged beside each other."""

from collections.abc import Iterator
from dataclasses import replace

from perennial.protocol.tensors import Tensors
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.request import Arrays
from perennial.strategies.round.running_bounds import RunningBounds
from perennial.strategies.sums.update_file import UpdateFile


class WaitingReplies:
    """Keeps the updates of one round on disk until no more come, and then gives those that count.

    compares: whether sites that point elsewhere than all the others are left out.
    """

    def __init__(self, running: RunningBounds, reference: Arrays, compares: bool) -> None:
        self._running, self._compares = running, compares
        self._replies: dict[str, Admitted] = {}
        self._updates = UpdateFile(reference)

    @classmethod
    def needed(
        cls, running: RunningBounds | None, reference: Arrays, comparable: bool, replies: int
    ) -> "WaitingReplies | None":
        """For a run's first round, which sets its own bounds, and where sites are compared; None elsewhere.

        comparable: whether the method's updates may be. replies: at most so many will come.
        """
        if running is None:
            return None
        compares = comparable and running.compares(replies)
        return cls(running, reference, compares) if compares or running.waiting else None

    def add(self, reply: Admitted) -> None:
        """Keep one reply. Raises OSError when the disk is full."""
        self._updates.add(reply.site, reply.update)
        self._replies[reply.site] = replace(reply, update={})

    def counting(self, quorum: int, dropped: list[tuple[str, str]]) -> Iterator[Admitted]:
        """The replies that count, in the order of the sites' names; who is left out is added to dropped."""
        left_out = self._running.left_out(self._updates, quorum) if self._compares else {}
        dropped += left_out.items()
        self._running.see_all(reply for site, reply in self._replies.items() if site not in left_out)
        for site, update in self._updates:
            if site not in left_out:
                yield replace(self._replies[site], update=Tensors(update))
