"""What the curriculum passes to a strategy: the start of a task, and the request of one round."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from perennial.config.bounds import BoundsConfig
from perennial.config.rounds import SumsConfig
from perennial.learning.worth import Worth
from perennial.privacy.signed_sums import Signer
from perennial.protocol.messages import TrainRequest
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import Tensors
from perennial.strategies.round.previous import PreviousModel

if TYPE_CHECKING:
    from perennial.strategies.round.gate import Admitted
    from perennial.strategies.round.running_bounds import RunningBounds

Arrays = Mapping[str, Tensor]
"""A model's tensors, or an update's, by name."""
Observer = Callable[["Admitted", Arrays, int], dict[str, Any]]
"""(reply taken into the model, the model that it started from, sweep of a ring or 1) -> JSON-able facts."""


@dataclass(frozen=True)
class TaskStart:
    """The facts about a task that begins. reference: the grown model's travelling tensors."""

    task: int
    num_classes: int
    new_classes: range
    reference: Arrays
    sites: tuple[str, ...]


@dataclass(frozen=True)
class Weighing:
    """Which models of a ring's round are measured.

    weigh: from a model to its worth on each class; None if nobody could measure it. sweeps: those whose
    models are measured, around each turn. first: measure before a site gets the model, not while it works.
    """

    weigh: Callable[[Arrays], Worth | None]
    sweeps: frozenset[int]
    first: bool = False


@dataclass(frozen=True)
class RoundRequest:
    """The request for one round of training. sites: name -> node id of those to ask, in canonical order."""

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
    bounds: BoundsConfig = BoundsConfig()
    sums: SumsConfig = SumsConfig()
    running: "RunningBounds | None" = None
    """Bounds that follow from former rounds; None where no site's norm may change what another counts."""
    max_update_norm: float | None = None
    """L2 norm above which an update is dropped; None: the strategy's own."""
    observers: tuple[Observer, ...] = ()
    """See each reply that was aggregated, while its update is still there, and change nothing."""
    signers: Mapping[str, Signer] = field(default_factory=dict)
    """The signing keys of the sites that sign their sums."""
    weighing: Weighing | None = None
    """How the turns of a ring are valued; None: they are not."""

    @property
    def most_replies(self) -> int:
        """A public bound on this round's number of updates: late ones and stand-ins come from known sites."""
        return max(self.known, len(self.sites) + len(self.resting))

    def message(self, arrays: Arrays | None = None, **fields: Any) -> TrainRequest:
        """The plain request of this round to any site. arrays: None: the round's own. fields: more."""
        return TrainRequest(
            **self.stamp.stamp_fields,
            arrays=Tensors(self.arrays if arrays is None else arrays),
            progress=self.progress,
            clip_norm=self.clip_norm,
            **fields,
        )


def with_settings(request: TrainRequest, **settings: Any) -> TrainRequest:
    """The request with more settings for the site, beside those that an outer strategy added."""
    return replace(request, settings=json.dumps({**json.loads(request.settings), **settings}, sort_keys=True))
