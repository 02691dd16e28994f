"""Local optimisers over one flat vector: PyTorch's own update rules, called through their functional form.

torch.optim's classes import the compiler stack when the first one is built, which costs a site several
seconds in every process; the functional forms are the same rules without it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from perennial.config.learner import Optimizer


class FlatOptimizer:
    """SGD or Adam over one vector: a step takes a few tensor operations, whatever the number of layers.

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
        self._first = [torch.zeros_like(parameters)] if config.name == "adam" else []
        self._second = [torch.zeros_like(parameters)] if config.name == "adam" else []
        counter = torch.zeros((), device=parameters.device if self._on_device else "cpu")
        self._steps = [counter] if config.name == "adam" else []

    @property
    def states(self) -> list[Tensor]:
        """Momentum, or Adam's two moments, each of the parameters' shape; [] if there are none yet."""
        momentum = [state for state in self._momentum if state is not None]
        return [*momentum, *self._first, *self._second]

    def move(self, parameters: Tensor, gradient: Tensor, states: Sequence[Tensor]) -> None:
        """Continue with other parameters, gradient memory and states, in the order of the property."""
        self._parameters, self._gradient = [parameters], [gradient]
        if self._config.name == "adam":
            self._first, self._second = [states[0]], [states[1]]
        else:
            self._momentum = [*states] or [None]

    def forget(self) -> None:
        """Free the memory of parameters, gradient and states; no step may follow."""
        self._parameters, self._gradient, self._momentum, self._first, self._second = [], [], [], [], []

    @torch.no_grad()
    def step(self) -> None:
        """Move the parameters by one step; the gradient is left as it is, for the caller to zero."""
        config = self._config
        if config.name == "sgd":
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
            )
