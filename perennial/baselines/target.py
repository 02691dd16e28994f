"""TARGET: inputs that the server makes from the old model keep old classes alive, without exemplars.

Zhang et al. 2023 (ICCV, arXiv 2303.06937).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from perennial.baselines.inversion import synthesise
from perennial.config.strategies import ASKS
from perennial.protocol.messages import TrainRequest
from perennial.protocol.tensors import Tensors
from perennial.strategies.fedavg import FedAvg
from perennial.strategies.round.nested_state import nested, part
from perennial.strategies.round.request import Arrays, TaskStart, with_settings
from perennial.strategies.round.traits import Traits


class Target(FedAvg):
    """FedAvg whose sites also distil the old model on made-up inputs.

    samples: how many inputs are made before each task after the first. steps: of the generator that makes
    them. distillation, temperature: its weight and softness at the sites. Made-up inputs are
    a function of a model that every site has seen; they travel to the sites in every round.
    """

    asks = ASKS["target"]
    traits = Traits(requires="the server's model, and distillation on made inputs at the sites")

    def __init__(
        self,
        samples: int = 256,
        steps: int = 200,
        distillation: float = 10.0,
        temperature: float = 2.0,
        max_update_norm: float | None = None,
        **flower: Any,
    ) -> None:
        super().__init__(max_update_norm, **flower)
        if samples < 2 or steps < 1 or not distillation > 0 or not temperature > 0:
            raise ValueError("allowed samples from 2, steps from 1, distillation and temperature above 0")
        self.samples, self.steps = samples, steps
        self.distillation, self.temperature = distillation, temperature
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
            self.temperature,
        )
        self.made = {"x": inputs, "logits": logits}

    def requests(self, request: TrainRequest, sites: Sequence[str]) -> dict[str, TrainRequest]:
        return dict.fromkeys(sites, self._with_inputs(request) if self.made else request)

    def state_dict(self) -> dict[str, Any]:
        return nested("made", self.made)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.made = part("made", state)

    def _with_inputs(self, request: TrainRequest) -> TrainRequest:
        rehearsal = {"weight": self.distillation, "temperature": self.temperature}
        tensors = {**(request.method or {}), **nested("rehearsal", self.made)}
        return replace(with_settings(request, rehearsal=rehearsal), method=Tensors(tensors))
