"""TARGET: inputs that the server makes from the old model keep old classes alive, without exemplars.

Zhang et al. 2023 (ICCV, arXiv 2303.06937).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from perennial.baselines.inversion import synthesise
from perennial.foundation.devices import to_device
from perennial.foundation.errors import ProtocolError
from perennial.foundation.streams import stream, torch_seed
from perennial.learning.losses import compute_distillation
from perennial.learning.objective import Term
from perennial.learning.site_method import LocalTurn, SiteMethod
from perennial.protocol.messages import TrainRequest
from perennial.protocol.tensors import Tensors
from perennial.strategies.fedavg import FedAvg
from perennial.strategies.round.request import Arrays, TaskStart, Traits, add_prefix, extract_prefixed

MADE = "rehearsal"
"""Prefix of the made inputs among the tensors of a request."""
DISTILLATION, TEMPERATURE = 10.0, 2.0


@dataclass(frozen=True)
class MadeInputs:
    """A term of the loss, with batches of inputs that the server made from the old model.

    x: (S, *input_shape), normalised. logits: (S, M_old), of the model to imitate.
    """

    x: Tensor
    logits: Tensor
    weight: float
    temperature: float
    batch_size: int
    generator: torch.Generator = field(default_factory=torch.Generator)

    def draw(self) -> tuple[Tensor, Tensor]:
        """(inputs, logits to imitate) of the next random batch."""
        drawn = torch.randint(len(self.x), (self.batch_size,), generator=self.generator)
        rows = to_device(drawn, self.x.device)
        return self.x[rows], self.logits[rows]

    def term(self, logits: Tensor, targets: Tensor) -> Term:
        """The weighted distillation loss of logits against targets, both of one batch of draw()."""
        return Term(
            compute_distillation(logits, targets, self.temperature), (self.temperature**2, self.weight)
        )


class TargetSite(SiteMethod):
    """The site half: distils the old model on the inputs that came with the request, if any did."""

    _made: MadeInputs | None = None
    _seed = 0

    def open(self, turn: LocalTurn) -> None:
        request = turn.request
        given = extract_prefixed(MADE, request.method or {})
        if not given:
            return
        x, logits = given.get("x"), given.get("logits")
        if x is None or logits is None:
            raise ProtocolError("TrainRequest: method: rehearsal/x or rehearsal/logits is missing")
        pairs = logits.dim() == 2 and len(x) == len(logits) > 0
        if not pairs or x.shape[1:] != turn.input_shape or logits.shape[1] > request.num_classes:
            raise ProtocolError(
                f"TrainRequest: method: rehearsal: found x {tuple(x.shape)}, logits {tuple(logits.shape)}; "
                f"expected (S, {', '.join(map(str, turn.input_shape))}) and (S, up to {request.num_classes})"
            )
        seed = torch_seed(stream(turn.seed, MADE, turn.site, request.round))
        self._seed = seed
        self._made = MadeInputs(
            x.to(turn.device),
            logits.to(turn.device),
            float(self.keys.get("distillation", DISTILLATION)),
            TEMPERATURE,
            turn.learner.batch_size,
        )

    def make_extra(self) -> MadeInputs | None:
        if self._made is None:
            return None
        return replace(self._made, generator=torch.Generator().manual_seed(self._seed))


class Target(FedAvg):
    """FedAvg whose sites also distil the old model on made-up inputs.

    samples: how many inputs are made before each task after the first. steps: of the generator that makes
    them. distillation: its weight at the sites. Made-up inputs are
    a function of a model that every site has seen; they travel to the sites in every round.
    """

    traits = Traits(requires="the server's model, and distillation on made inputs at the sites")

    def __init__(
        self,
        samples: int = 256,
        steps: int = 200,
        distillation: float = DISTILLATION,
        **flower: Any,
    ) -> None:
        super().__init__(**flower)
        if samples < 2 or steps < 1 or not distillation > 0:
            raise ValueError("allowed samples from 2, steps from 1, distillation above 0")
        self.samples, self.steps, self.distillation = samples, steps, distillation
        self.made: dict[str, Tensor] = {}
        self._whole: Target | None = None

    def serve_group(self, whole: Any, own: Arrays, former: Any) -> None:
        """Use the inputs that `whole`, the strategy of all groups, makes from the old model."""
        self._whole = whole

    def begin_task(self, task: TaskStart) -> None:
        """Make inputs of the classes before this task. Raises ConfigError if the run lends no model."""
        if self._whole is not None:
            self.made = self._whole.made
            return
        if task.new_classes.start == 0:
            return
        inputs, logits = synthesise(
            self.run.load(task.reference),
            task.new_classes.start,
            self.run.input_shape,
            self.samples,
            self.run.experiment.seed,
            task.task,
            self.steps,
            TEMPERATURE,
        )
        self.made = {"x": inputs, "logits": logits}

    def requests(self, request: TrainRequest, sites: Sequence[str]) -> dict[str, TrainRequest]:
        return dict.fromkeys(sites, self._add_inputs(request) if self.made else request)

    def state_dict(self) -> dict[str, Any]:
        return add_prefix("made", self.made)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.made = extract_prefixed("made", state)

    def _add_inputs(self, request: TrainRequest) -> TrainRequest:
        return replace(request, method=Tensors({**(request.method or {}), **add_prefix(MADE, self.made)}))
