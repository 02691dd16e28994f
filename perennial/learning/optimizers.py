"""Local optimisers over one flat vector: PyTorch's own update rules.

torch.optim's classes import the compiler stack when the first one is built, which costs a site several
seconds in every process. SGD, Adam and AdamW are called through their functional forms, which are the same
rules without it; the others are torch.optim's classes.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.optim
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from perennial.config.learner import Optimizer

_CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    kind.__name__.lower(): kind
    for kind in (
        *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adamax, torch.optim.ASGD),
        *(torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop),
    )
}


class FlatOptimizer:
    """An optimiser over one vector: a step takes a few tensor operations, whatever the number of layers.

    parameters, gradient: (P,) float32, the same memory in every step. progress: share of the task's rounds
    done, for the cosine schedule (Loshchilov and Hutter 2017, arXiv 1608.03983). recorded: keep Adam's number
    of steps on the GPU, so that a step that is replayed finds it there.
    """

    def __init__(
        self,
        config: Optimizer,
        parameters: Tensor,
        gradient: Tensor,
        progress: float = 0.0,
        *,
        recorded: bool = False,
    ) -> None:
        self._config = config
        self._on_device = recorded and parameters.device.type == "cuda"
        self._parameters = [parameters]
        self._gradient = [gradient]
        self.lr = config.lr
        if config.schedule == "cosine":
            self.lr *= 0.5 * (1 + math.cos(math.pi * progress))
        self._momentum: list[Tensor | None] = [None]
        adam = config.name in ("adam", "adamw")
        self._first = [torch.zeros_like(parameters)] if adam else []
        self._second = [torch.zeros_like(parameters)] if adam else []
        counter = torch.zeros((), device=parameters.device if self._on_device else "cpu")
        self._steps = [counter] if adam else []
        self._rule = None
        if config.name in _CLASSES:
            self._rule = _CLASSES[config.name]([parameters], lr=self.lr, **config.further)

    @property
    def obstacle(self) -> str:
        """Why a step cannot be recorded, in words; '' if it can be."""
        return "" if self._rule is None else f"learner.optimizer {self._config.name} counts its steps itself"

    @property
    def states(self) -> list[Tensor]:
        """What the rule remembers of each parameter, each of the parameters' shape; [] if nothing yet."""
        momentum = [state for state in self._momentum if state is not None]
        return [*momentum, *self._first, *self._second, *self._remembered().values()]

    def _remembered(self) -> dict[str, Tensor]:
        """Name -> the state of torch.optim's rule that has the parameters' shape."""
        if self._rule is None:
            return {}
        shape, found = self._parameters[0].shape, self._rule.state[self._parameters[0]]
        return {
            name: value for name, value in found.items() if isinstance(value, Tensor) and value.shape == shape
        }

    def move(self, parameters: Tensor, gradient: Tensor, states: Sequence[Tensor]) -> None:
        """Continue with other parameters, gradient memory and states, in the order of the property."""
        if self._rule is not None:
            moved = dict(zip(self._remembered(), states, strict=True))
            kept = self._rule.state.pop(self._parameters[0])
            self._rule.param_groups[0]["params"] = [parameters]
            self._rule.state[parameters] = {**kept, **moved}
        self._parameters, self._gradient = [parameters], [gradient]
        if self._first:
            self._first, self._second = [states[0]], [states[1]]
        elif self._rule is None:
            self._momentum = [*states] or [None]

    def forget(self) -> None:
        """Free the memory of parameters, gradient and states; no step may follow."""
        self._parameters, self._gradient, self._momentum, self._first, self._second = [], [], [], [], []
        self._rule = None

    @torch.no_grad()
    def step(self) -> None:
        """Move the parameters by one step; the gradient is left as it is, for the caller to zero."""
        config = self._config
        if self._rule is not None:
            self._parameters[0].grad = self._gradient[0]
            self._rule.step()
        elif config.name == "sgd":
            sgd(
                self._parameters,
                self._gradient,
                self._momentum,
                foreach=False,
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                lr=self.lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
        else:
            adam(
                self._parameters,
                self._gradient,
                self._first,
                self._second,
                [],
                self._steps,
                foreach=False,
                capturable=self._on_device,
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                lr=self.lr,
                weight_decay=config.weight_decay,
                eps=1e-8,
                maximize=False,
                decoupled_weight_decay=config.name == "adamw",
            )
