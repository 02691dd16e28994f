"""Distillation on inputs that the server makes and sends with its request.

Shapes: x (S, *input_shape) float32, normalised; logits (S, M_old), of the model to imitate.
"""

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from perennial.client.settings import part_of_settings
from perennial.client.site import Site
from perennial.foundation.block import FiniteBlock
from perennial.foundation.devices import to_device
from perennial.foundation.errors import ProtocolError
from perennial.foundation.streams import stream, torch_seed
from perennial.learning.losses import distillation
from perennial.learning.objective import Term
from perennial.protocol.messages import TrainRequest


class DataFreeDistillationSettings(FiniteBlock):
    """`rehearsal` of a request's settings."""

    weight: float = Field(gt=0, le=1e4)
    temperature: float = Field(gt=0, le=100)


@dataclass
class DataFreeDistillation:
    """A term of the loss, with batches of its own."""

    x: Tensor
    logits: Tensor
    order: DataFreeDistillationSettings
    batch_size: int
    generator: torch.Generator

    def draw(self) -> tuple[Tensor, Tensor]:
        """(inputs, logits to imitate) of the next random batch."""
        drawn = torch.randint(len(self.x), (self.batch_size,), generator=self.generator)
        rows = to_device(drawn, self.x.device)
        return self.x[rows], self.logits[rows]

    def term(self, logits: Tensor, targets: Tensor) -> Term:
        """The weighted distillation loss of logits against targets, both of one batch of draw()."""
        temperature = self.order.temperature
        return Term(distillation(logits, targets, temperature), (temperature**2, self.order.weight))


def open_data_free_distillation(site: Site, request: TrainRequest) -> DataFreeDistillation | None:
    """The distillation term that the request asks for, or None. Raises ProtocolError naming what is wrong."""
    order = part_of_settings(request, "rehearsal", DataFreeDistillationSettings)
    if order is None:
        return None
    given = request.method or {}
    x, logits = given.get("rehearsal/x"), given.get("rehearsal/logits")
    shape = site.models.input_shape
    if x is None or logits is None:
        raise ProtocolError("TrainRequest: method: rehearsal/x or rehearsal/logits is missing")
    pairs = logits.dim() == 2 and len(x) == len(logits) > 0
    if not pairs or x.shape[1:] != shape or logits.shape[1] > request.num_classes:
        raise ProtocolError(
            f"TrainRequest: method: rehearsal: found x {tuple(x.shape)}, logits {tuple(logits.shape)}; "
            f"expected (S, {', '.join(map(str, shape))}) and (S, up to {request.num_classes})"
        )
    seed = torch_seed(stream(site.experiment.seed, "rehearsal", site.name, request.round))
    return DataFreeDistillation(
        x.to(site.models.device),
        logits.to(site.models.device),
        order,
        site.experiment.learner.batch_size,
        torch.Generator().manual_seed(seed),
    )
