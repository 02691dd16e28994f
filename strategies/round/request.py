"""What the curriculum passes to a strategy: the start of a task, and the request of one round."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from perennial.protocol.stamp import Stamp
from perennial.strategies.round.previous import PreviousModel

Arrays = Mapping[str, Tensor]
"""A model's tensors, or an update's, by name."""


@dataclass(frozen=True)
class TaskStart:
    """What a strategy learns when a task begins. reference: the grown model's travelling tensors."""

    task: int
    num_classes: int
    new_classes: range
    reference: Arrays
    sites: tuple[str, ...]


@dataclass(frozen=True)
class RoundRequest:
    """One round that the curriculum asks for. sites: name -> node id of those to ask, in canonical order."""

    stamp: Stamp
    arrays: Arrays
    sites: Mapping[str, int]
    deadline: float
    quorum: int = 1
    progress: float = 0.0
    previous: PreviousModel = PreviousModel()
    clip_norm: float | None = None
    """Sent to the sites under adaptive clipping."""
    resting: frozenset[str] = frozenset()
    """Sites that are there and are not asked in this round."""
    known: int = 0
    """Sites that have taken part in the run so far."""

    @property
    def most_replies(self) -> int:
        """A public bound on the updates of this round: late ones and stand-ins come from known sites."""
        return max(self.known, len(self.sites) + len(self.resting))
