"""FedProx, and optimisers at the server: the exact mean of the updates first, then a published rule.

Reddi et al. 2021 (arXiv 2003.00295) for Adam, Yogi and Adagrad; Hsu et al. 2019 (arXiv 1909.06335) for
momentum; Li et al. 2020 (arXiv 1812.06127) for FedProx.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from perennial.config.strategies import ASKS
from perennial.learning.site_method import FedProx as Proximal
from perennial.models.layers import grown
from perennial.strategies.fedavg import FedAvg, WeightedMean
from perennial.strategies.round.context import Aggregator, RoundContext
from perennial.strategies.round.request import Arrays, TaskStart, add_prefix, extract_prefixed
from perennial.strategies.sums.exact_sum import is_statistic, make_parameter_zeros

MU = 0.01
MOMENTUM, SCALE = "momentum", "scale"


class FedProxSite(Proximal):
    """The site half: each gradient is pulled back to the model received, by mu."""

    def __init__(self, keys: Mapping[str, Any]) -> None:
        super().__init__({"mu": MU, **keys})


class FedProx(FedAvg):
    """FedAvg whose sites stay near the model received; mu is the strength of the pull.

    Bit-identical to `fedavg` with `learner.correction: {name: fedprox, mu: MU}`.
    """

    asks = ASKS["fedprox"]
    traits = replace(FedAvg.traits, requires="the proximal term in the sites' steps")
    largest_weight = FedAvg.largest_weight

    def __init__(self, mu: float = MU, **flower: Any) -> None:
        super().__init__(**flower)
        self.mu = _check_value("mu", mu, mu >= 0, "0 or more")


class ServerOptimiser(FedAvg):
    """Takes the mean update of a round as the gradient of an optimiser at the server.

    Its moments have the model's shape, are in the checkpoint, and grow with the head: entries of new classes
    begin as all entries began. Running statistics of normalisation layers are averaged alone.
    """

    asks = ASKS["fedavgm"]
    state_names: tuple[str, ...] = (MOMENTUM,)

    def __init__(self, server_lr: float, **flower: Any) -> None:
        super().__init__(**flower)
        self.server_lr = _check_value("server_lr", server_lr, server_lr > 0, "above 0")
        self.state: dict[str, dict[str, Tensor]] = {name: {} for name in self.state_names}

    def beginning(self, name: str) -> float:
        """The first value of every entry of a moment."""
        return 0.0

    def step(self, state: dict[str, Tensor], mean: Tensor) -> Tensor:
        """Move the moments of one tensor in place, and return the server's step.

        Args:
            state: moment's name -> its values, float64.
            mean: the mean update, float64.
        """
        raise NotImplementedError

    def begin_task(self, task: TaskStart) -> None:
        self._grow(task.reference)

    def aggregator(self, ctx: RoundContext) -> Aggregator:
        # under Flower's own start() no task begins
        self._grow(ctx.reference)
        return OptimisedMean(ctx, self)

    def take_sum(self, ctx: RoundContext, total: Arrays, weight: float) -> dict[str, Tensor]:
        new, divisor = super().take_sum(ctx, total, weight), ctx.asked if self.fixed_weights else weight
        for name, tensor in ctx.reference.items():
            if is_statistic(name):
                continue
            moments = {kind: values[name].double() for kind, values in self.state.items()}
            moved = self.step(moments, total[name].to(tensor.device).double() / divisor)
            for kind, values in moments.items():
                self.state[kind][name] = values.to(tensor.dtype)
            new[name] = (tensor + moved).to(tensor.dtype)
        return new

    def state_dict(self) -> dict[str, Any]:
        return {
            key: value
            for kind, tensors in self.state.items()
            for key, value in add_prefix(kind, tensors).items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = {kind: extract_prefixed(kind, state) for kind in self.state_names}

    def _grow(self, arrays: Arrays) -> None:
        for kind, former in self.state.items():
            first = {
                name: torch.full_like(zeros, self.beginning(kind))
                for name, zeros in make_parameter_zeros(arrays).items()
            }
            self.state[kind] = grown(former, first)


class OptimisedMean(WeightedMean):
    """The exact sum of a round, from which the server's optimiser makes its step."""

    def __init__(self, ctx: RoundContext, optimiser: ServerOptimiser) -> None:
        super().__init__(ctx, optimiser)
        self._optimiser = optimiser

    def result(self) -> dict[str, Tensor]:
        return self._optimiser.take_sum(self.ctx, self.sum.value(), self.sum.weight)


class FedAvgM(ServerOptimiser):
    """Momentum at the server: m = momentum m + mean; theta + server_lr m."""

    def __init__(
        self,
        server_lr: float = 1.0,
        momentum: float = 0.9,
        **flower: Any,
    ) -> None:
        super().__init__(server_lr, **flower)
        self.momentum = _check_value("momentum", momentum, 0 <= momentum < 1, "0 to below 1")

    def step(self, state: dict[str, Tensor], mean: Tensor) -> Tensor:
        state[MOMENTUM] = self.momentum * state[MOMENTUM] + mean
        return self.server_lr * state[MOMENTUM]


class Adaptive(ServerOptimiser):
    """theta + server_lr m / (sqrt(v) + tau), with m = beta_1 m + (1 - beta_1) mean, and v from tau^2 on.

    A subclass says how v moves. As published there is no correction of the first steps, which Flower's rules
    of these names have.
    """

    state_names = (MOMENTUM, SCALE)
    beta_1 = 0.9
    beta_2 = 0.99

    def __init__(
        self,
        server_lr: float = 0.1,
        tau: float = 1e-3,
        **flower: Any,
    ) -> None:
        super().__init__(server_lr, **flower)
        self.tau = _check_value("tau", tau, tau > 0, "above 0")

    def beginning(self, name: str) -> float:
        return self.tau**2 if name == SCALE else 0.0

    def scaled(self, scale: Tensor, square: Tensor) -> Tensor:
        """The next v, from the former one and the square of the mean update."""
        raise NotImplementedError

    def step(self, state: dict[str, Tensor], mean: Tensor) -> Tensor:
        state[MOMENTUM] = self.beta_1 * state[MOMENTUM] + (1 - self.beta_1) * mean
        state[SCALE] = self.scaled(state[SCALE], mean.square())
        return self.server_lr * state[MOMENTUM] / (state[SCALE].sqrt() + self.tau)


class FedAdam(Adaptive):
    """v = beta_2 v + (1 - beta_2) mean^2."""

    def scaled(self, scale: Tensor, square: Tensor) -> Tensor:
        return self.beta_2 * scale + (1 - self.beta_2) * square


class FedYogi(Adaptive):
    """v = v - (1 - beta_2) mean^2 sign(v - mean^2)."""

    def scaled(self, scale: Tensor, square: Tensor) -> Tensor:
        return scale - (1 - self.beta_2) * square * torch.sign(scale - square)


class FedAdagrad(Adaptive):
    """v = v + mean^2, as published without momentum (beta_1 = 0)."""

    beta_1 = 0.0

    def scaled(self, scale: Tensor, square: Tensor) -> Tensor:
        return scale + square


def _check_value(key: str, value: float, allowed: bool, words: str) -> float:
    if not (allowed and math.isfinite(value)):
        raise ValueError(f"{key}: found {value}, allowed finite numbers, {words}")
    return value
