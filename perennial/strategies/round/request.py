"""What the curriculum passes to a strategy: the start of a task, and the request of one round."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from perennial.config.rounds import BoundsConfig
from perennial.privacy.combinations import ReleaseProtection
from perennial.protocol.messages import TrainRequest
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import Tensors

if TYPE_CHECKING:
    from perennial.strategies.round.gate import Admitted, RunningBounds


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
class PreviousModel:
    """The previous task's model, and the sites that hold it.

    sha256, read: of the complete model, which stays on the disk; empty in task 1, and if no site needs it.
    holders: names of the sites that are known to hold it.
    """

    sha256: str = ""
    read: Callable[[], Mapping[str, Tensor] | None] = lambda: None
    holders: frozenset[str] = frozenset()

    def build_fields(self, *, held: bool) -> dict[str, Any]:
        """A request's fields about the model: `previous`, and `previous_arrays` unless the site holds it."""
        arrays = None if held else self.read()
        return {"previous": self.sha256, "previous_arrays": None if arrays is None else Tensors(arrays)}

    def build_site_fields(self, site: str) -> dict[str, Any]:
        """The fields of a request to this site."""
        return self.build_fields(held=site in self.holders)

    def group_fields(self, sites: Iterable[str]) -> list[tuple[list[str], dict[str, Any]]]:
        """(sites, fields of their requests), for sites that hold the model and for those that do not."""
        held: dict[bool, list[str]] = {}
        for site in sites:
            held.setdefault(not self.sha256 or site in self.holders, []).append(site)
        return [(held[key], self.build_fields(held=key)) for key in (True, False) if key in held]


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
    resting: frozenset[str] = frozenset()
    """Sites that are there and are not asked in this round."""
    known: int = 0
    """Sites that have taken part in the run so far."""
    bounds: BoundsConfig = BoundsConfig()
    running: "RunningBounds | None" = None
    """Bounds that follow from former rounds; None where no site's norm may change what another counts."""
    max_update_norm: float | None = None
    """L2 norm above which an update is dropped; None: the strategy's own."""
    observers: tuple[Observer, ...] = ()
    """See each reply that was aggregated, while its update is still there, and change nothing."""

    @property
    def most_replies(self) -> int:
        """A public bound on this round's number of updates: late ones and stand-ins come from known sites."""
        return max(self.known, len(self.sites) + len(self.resting))

    def build_request(self, arrays: Arrays | None = None, **fields: Any) -> TrainRequest:
        """The plain request of this round to any site. arrays: None: the round's own. fields: more."""
        return TrainRequest(
            **self.stamp.stamp_fields,
            arrays=Tensors(self.arrays if arrays is None else arrays),
            **fields,
        )


def add_settings(request: TrainRequest, **settings: Any) -> TrainRequest:
    """The request with more settings for the site, beside those that an outer strategy added."""
    return replace(request, settings=json.dumps({**json.loads(request.settings), **settings}, sort_keys=True))


@dataclass(frozen=True)
class Traits:
    """What a method allows and needs.

    staleness: rounds by which a reply may be late and still be used.
    waits_for_busy_sites: a round waits for sites that work on an earlier one if too few others are there.
    accepts_scaled_updates: an update may be scaled down; not if the site remembers the whole of it.
    runs_per_cluster: a cluster can have a strategy of this kind, beside those of other clusters.
    aggregates_in_parallel: a round is one exchange with all sites, whose replies go to one aggregator; a ring
    has hops instead.
    imputes_absent_sites: it makes updates in place of sites that do not answer.
    requires: what the method needs and Flower's own start() with other people's ClientApps does not give, in
    words; without it another method would run under this one's name. "": nothing.
    """

    staleness: int = 0
    waits_for_busy_sites: bool = True
    accepts_scaled_updates: bool = True
    runs_per_cluster: bool = True
    aggregates_in_parallel: bool = True
    imputes_absent_sites: bool = False
    requires: str = ""


@dataclass(frozen=True)
class Disclosures:
    """What a method needs from the sites beside the update.

    weights_use_metrics: a site's weight depends on loss or accuracy that it reports.
    clear_uploads: names of arrays or figures that replies carry without noise.
    sparsity: the unit that the release's own noise hides, "none" without a proven guarantee; None when it is
    not sent.
    """

    weights_use_metrics: bool = False
    clear_uploads: tuple[str, ...] = ()
    sparsity: ReleaseProtection | None = None

    def __or__(self, other: "Disclosures") -> "Disclosures":
        """What two methods, one around the other, need."""
        return Disclosures(
            self.weights_use_metrics or other.weights_use_metrics,
            tuple(dict.fromkeys((*self.clear_uploads, *other.clear_uploads))),
            other.sparsity if self.sparsity is None else self.sparsity,
        )


def add_prefix(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """The values with their names prefixed by `prefix/`."""
    return {f"{prefix}/{name}": value for name, value in state.items()}


def extract_prefixed(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """The values that add_prefix() prefixed, under their own names."""
    start = f"{prefix}/"
    return {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
