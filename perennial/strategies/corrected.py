"""The base of SCAFFOLD, FedDyn and AdaBest: corrections at the sites, and one vector at the server.

Sites count alike, each site corrects its gradients by a vector of its own, and the server keeps one vector of
the model's shape across rounds. Both halves of the base stand here.
"""

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from perennial.foundation.errors import PolicyRefusal, ProtocolError
from perennial.foundation.plain import FiniteBlock
from perennial.learning.site_method import LocalTurn, PlannedRun, SiteMethod, read_settings_part
from perennial.models.layers import grown
from perennial.protocol.messages import TrainRequest
from perennial.protocol.stamp import Stamp
from perennial.strategies.fedavg import FedAvg, WeightedMean
from perennial.strategies.round.context import RoundContext
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.request import (
    Arrays,
    RoundRequest,
    TaskStart,
    Traits,
    add_prefix,
    add_settings,
    extract_prefixed,
)
from perennial.strategies.sums.exact_sum import make_parameter_zeros


class Corrected(FedAvg):
    """Uniform mean of the sites' models, with a server vector and corrections at the sites.

    memory: name -> tensor, the server's vector; a subclass says what it means. population: every site that
    was connected at a task's start or has ever answered. folded: site -> its last round that memory includes;
    the next request says so, and the site rolls back what it stored for lost ones.
    """

    traits = Traits(accepts_scaled_updates=False)

    def __init__(self, **flower: Any) -> None:
        super().__init__(**flower)
        self.memory: dict[str, Tensor] = {}
        self.population: set[str] = set()
        self.folded: dict[str, int] = {}

    # what a method changes

    name = ""
    """By which a site knows records of this method."""

    def beginning(self, arrays: Arrays) -> dict[str, Tensor]:
        """First values of the server's vector, for new classes too. arrays: the model's."""
        return make_parameter_zeros(arrays)

    # the rest follows

    def begin_task(self, task: TaskStart) -> None:
        self.memory = grown(self.memory, self.beginning(task.reference))
        self.population |= set(task.sites)

    def requests(self, request: TrainRequest, sites: Sequence[str]) -> dict[str, TrainRequest]:
        last = {site: self.folded.get(site, 0) for site in sites}
        # one object for all sites that get the same message, so that a model is serialised once for a round
        made = {number: self.ordered(request, number) for number in sorted(set(last.values()))}
        return {site: made[last[site]] for site in sites}

    def ordered(self, request: TrainRequest, last: int) -> TrainRequest:
        """The request with the correction and `last`, the site's last round that memory includes."""
        return add_settings(request, correction={"name": self.name, "folded": last})

    def weight(self, reply: Admitted) -> float:
        return 1.0

    def largest_sum_weight(self, request: RoundRequest) -> float:
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        return {
            "population": sorted(self.population),
            "folded": self.folded,
            **add_prefix("memory", self.memory),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.population, self.folded = set(state["population"]), dict(state["folded"])
        self.memory = extract_prefixed("memory", state)


class CorrectedMean(WeightedMean):
    """The uniform mean of a round, by which a subclass moves the model and the server's vector."""

    def __init__(self, ctx: RoundContext, corrected: Corrected) -> None:
        super().__init__(ctx, corrected)
        self.corrected = corrected
        self._answered: dict[str, int] = {}
        # under Flower's own start() no task begins
        corrected.memory = grown(corrected.memory, corrected.beginning(ctx.reference))

    def add(self, reply: Admitted) -> None:
        super().add(reply)
        self.corrected.population.add(reply.site)
        if not reply.stand_in:
            self._answered[reply.site] = reply.base_round

    def result(self) -> dict[str, Tensor]:
        # a round without a quorum has no result, and its replies count as lost
        self.corrected.folded |= self._answered
        return self.moved()

    def moved(self) -> dict[str, Tensor]:
        """Move the server's vector, and return the new global model."""
        raise NotImplementedError


RECORD = "correction"
IN_CLUSTER = "correction-in-cluster"
"""Each task's clusters begin with a server vector of their own, to which a site's memory must belong."""


def read_personal_layers(turn: LocalTurn) -> list[str] | None:
    """Read which layers are the site's own; None in rounds of a global model."""
    return turn.read_settings("personal", list[str])


class CorrectionOrder(FiniteBlock):
    """`correction` of a request's settings.

    folded: last round of this site whose update is in the server's vector, 0 before the first. What the site
    stored in later rounds is rolled back: those replies were lost, late or refused.
    """

    name: str
    folded: int = Field(ge=0)


class CorrectedSite(SiteMethod):
    """The site half: a vector that the site remembers from round to round, and shifts its gradients by.

    It is computed from the update as it was released, so under privacy it holds nothing more than the release
    does; it is written before the reply leaves. Personal layers have no correction, because no other site has
    such a layer from which this one could drift.

    own: (T,), what the site remembers. since: rounds since it was written.
    """

    name = ""
    order: CorrectionOrder | None = None
    own: Tensor
    since: int

    def start(self, turn: LocalTurn) -> None:
        """Set shift and pull from `own`."""
        raise NotImplementedError

    def moved(self, change: Tensor, steps: int) -> Tensor:
        """What to remember, (T,). change: (T,), the update as released. steps: of the optimiser."""
        raise NotImplementedError

    def check(self, request: Stamp, plan: PlannedRun) -> None:
        """Check an order. Raises PolicyRefusal for a round that is not over."""
        if not isinstance(request, TrainRequest):
            return
        order = read_settings_part(request, "correction", CorrectionOrder)
        if order is not None and order.folded >= request.round:
            raise PolicyRefusal(
                f"settings.correction.folded: found {order.folded} in round {request.round}, allowed 0 to "
                f"{request.round - 1}"
            )

    def open(self, turn: LocalTurn) -> None:
        """Read what the site remembers; nothing without an order, as in rounds of pre-training."""
        self.turn, self.order = turn, turn.read_settings("correction", CorrectionOrder)
        if self.order is None:
            return
        if self.order.name != self.name:
            raise ProtocolError(
                f"TrainRequest: settings.correction.name: found {self.order.name!r:.40}, allowed "
                f"{self.name!r}"
            )
        self.own, self.since = self._remembered(turn, self.order)
        self.start(turn)

    def close(self, update: Tensor, steps: int) -> None:
        if self.order is None:
            return
        request = self.turn.request
        named = self.turn.flat.view_trained(self.moved(update[: len(self.own)], steps))
        own = read_personal_layers(self.turn) or ()
        shared = {name: tensor for name, tensor in named.items() if name not in own}
        facts = {"name": self.name, "round": request.round, "task": request.task}
        self.turn.records.forget(self._record, after=self.order.folded, before=request.round)
        self.turn.records.put(self._record, request.round, shared, facts)

    def _remembered(self, turn: LocalTurn, order: CorrectionOrder) -> tuple[Tensor, int]:
        """This site's vector after the last folded round, zero for new classes; rounds since then."""
        flat, request = turn.flat, turn.request
        found = flat.view_trained(torch.zeros_like(flat.trainable))
        record, since = turn.records.get(self._record, min(order.folded + 1, request.round)), 1
        if record is not None and self._record == IN_CLUSTER and record[1]["task"] != request.task:
            record = None
        if record is not None and record[1]["name"] == self.name:
            found = grown(record[0], found)
            since = max(1, request.round - record[1]["round"])
        return flat.flatten_trained(found), since

    @property
    def _record(self) -> str:
        return RECORD if read_personal_layers(self.turn) is None else IN_CLUSTER
