"""Local corrections: terms that pull a site's gradients towards the federation's, and their state.

FedProx is the learner's own (`learner.correction`). SCAFFOLD, FedDyn and AdaBest also have a part at the
server, which asks for them in a request's settings: {"correction": {"name": "feddyn", "alpha": 0.1}}. A site
computes its vector from the update as it was released, so under privacy the vector holds nothing more than
the release does; it is written before the reply leaves. Personal layers have no correction, because no other
site has such a layer from which this one could drift.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from perennial.client.settings import part_of_settings
from perennial.client.site import Site
from perennial.foundation.block import FiniteBlock
from perennial.foundation.errors import ProtocolError
from perennial.learning.gradient_correction import GradientCorrection
from perennial.models.flat import FlatParameters
from perennial.models.growth import grown
from perennial.protocol.messages import TrainRequest

RECORD = "correction"
IN_CLUSTER = "correction-in-cluster"
"""Each task's clusters begin with a server vector of their own, to which a site's memory must belong."""
CONTROL = "control/"


class CorrectionOrder(FiniteBlock):
    """Settings of a correction for which the server keeps a vector too.

    folded: last round of this site whose update is in the server's vector, 0 before the first. What the site
    stored in later rounds is rolled back: those replies were lost, late or refused.
    """

    folded: int = Field(ge=0)


class ScaffoldOrder(CorrectionOrder):
    """Karimireddy et al. 2020 (arXiv 1910.06378), option II; c comes with the request as `control/NAME`."""

    name: Literal["scaffold"]


class FedDynOrder(CorrectionOrder):
    """Acar et al. 2021 (arXiv 2111.04263)."""

    name: Literal["feddyn"]
    alpha: float = Field(gt=0, le=1e3)


class AdaBestOrder(CorrectionOrder):
    """Varno et al. 2022 (arXiv 2204.13170)."""

    name: Literal["adabest"]
    mu: float = Field(ge=0, le=1e3)


Order = ScaffoldOrder | FedDynOrder | AdaBestOrder
_ORDER: TypeAdapter[Order] = TypeAdapter(Annotated[Order, Field(discriminator="name")])


@dataclass(frozen=True)
class LocalCorrection:
    """One site's correction in one round.

    own: (T,) what the site remembers (c_k or h_k). control: (T,) SCAFFOLD's c. since: rounds since own was
    written. lr: size of a local step.
    """

    site: Site
    request: TrainRequest
    flat: FlatParameters
    order: Order | None
    own: Tensor
    control: Tensor
    since: int
    gradient: GradientCorrection | None

    def remember(self, update: Tensor, steps: int) -> None:
        """Write what the site remembers for later rounds. update: (P,) as released; steps: local steps."""
        if self.order is None:
            return
        change = update[: len(self.own)]
        match self.order:
            case ScaffoldOrder():
                scale = steps * self.site.experiment.learner.optimizer.lr
                own = self.own - self.control - change / scale
            case FedDynOrder():
                own = self.own - self.order.alpha * change
            case AdaBestOrder():
                own = self.own / self.since - self.order.mu * change
        request, named = self.request, self.flat.trained_views(own)
        shared = {name: tensor for name, tensor in named.items() if name not in (request.personal or ())}
        facts = {"name": self.order.name, "round": request.round, "task": request.task}
        state, kept = self.site.state(request.run), _record(request)
        state.forget(kept, after=self.order.folded, before=request.round)
        state.put(kept, request.round, shared, facts)


def open_correction(site: Site, request: TrainRequest, flat: FlatParameters) -> LocalCorrection:
    """The correction that the learner and the request ask for, with what this site remembers of it.

    Raises ProtocolError naming what is wrong with the order, StateError when the site's record is damaged.
    """
    proximal = site.experiment.learner.correction
    pull = proximal.mu if proximal is not None else 0.0
    nothing = torch.empty(0)
    order = part_of_settings(request, "correction", _ORDER)
    if order is None:
        gradient = GradientCorrection(pull=pull) if pull else None
        return LocalCorrection(site, request, flat, None, nothing, nothing, 1, gradient)
    own, since = _remembered(site, request, flat, order)
    control = nothing
    match order:
        case ScaffoldOrder():
            control = _control(request, flat)
            shift = control - own
        case FedDynOrder():
            shift, pull = -own, pull + order.alpha
        case AdaBestOrder():
            shift = -own
    return LocalCorrection(site, request, flat, order, own, control, since, GradientCorrection(shift, pull))


def _remembered(site: Site, request: TrainRequest, flat: FlatParameters, order: Order) -> tuple[Tensor, int]:
    """This site's vector after the last round that was folded, and the rounds since then.

    The vector is (T,), and zero for classes that are new.
    """
    found = flat.trained_views(torch.zeros_like(flat.trainable))
    kept = _record(request)
    record = site.state(request.run).get(kept, min(order.folded + 1, request.round))
    since = 1
    if record is not None and kept == IN_CLUSTER and record[1]["task"] != request.task:
        record = None
    if record is not None and record[1]["name"] == order.name:
        found = grown(record[0], found)
        since = max(1, request.round - record[1]["round"])
    return flat.trained_vector(found), since


def _record(request: TrainRequest) -> str:
    return RECORD if request.personal is None else IN_CLUSTER


def _control(request: TrainRequest, flat: FlatParameters) -> Tensor:
    given = {
        name.removeprefix(CONTROL): tensor
        for name, tensor in (request.method or {}).items()
        if name.startswith(CONTROL)
    }
    given |= {name: torch.zeros(flat.shapes[name]) for name in request.personal or () if name in flat.shapes}
    for name in flat.trainable_keys:
        if name not in given or given[name].shape != flat.shapes[name]:
            found = tuple(given[name].shape) if name in given else "nothing"
            raise ProtocolError(
                f"TrainRequest: method: {CONTROL}{name}: found {found}, expected {tuple(flat.shapes[name])}"
            )
    return flat.trained_vector(given)
