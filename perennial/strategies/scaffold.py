"""SCAFFOLD: control variates take each site's drift out of its steps. Both halves.

Karimireddy et al. 2020 (arXiv 1910.06378).
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from perennial.config.strategies import ASKS
from perennial.foundation.errors import ProtocolError
from perennial.learning.site_method import LocalTurn
from perennial.protocol.messages import TrainRequest
from perennial.protocol.tensors import Tensors
from perennial.strategies.corrected import Corrected, CorrectedMean, CorrectedSite, read_personal_layers
from perennial.strategies.round.context import Aggregator, RoundContext, RunContext
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.request import add_prefix, extract_prefixed
from perennial.strategies.sums.exact_sum import ExactSum, is_statistic, make_parameter_zeros

PER_STEP = "per step"
CONTROL = "control"
"""Prefix of c among the tensors of a request."""


class ScaffoldSite(CorrectedSite):
    """The site half, option II: steps along gradient - c_k + c; own is c_k."""

    name = "scaffold"

    def start(self, turn: LocalTurn) -> None:
        self.control = _read_control(turn)
        self.shift = self.control - self.own

    def moved(self, change: Tensor, steps: int) -> Tensor:
        return self.own - self.control - change / (steps * self.turn.learner.optimizer.lr)


def _read_control(turn: LocalTurn) -> Tensor:
    """Read c, (T,), from a request. Personal layers have none there, and 0 here."""
    flat, request = turn.flat, turn.request
    given, own = extract_prefixed(CONTROL, request.method or {}), read_personal_layers(turn) or ()
    given |= {name: torch.zeros(flat.shapes[name]) for name in own if name in flat.shapes}
    for name in flat.trainable_keys:
        if name not in given or given[name].shape != flat.shapes[name]:
            found = tuple(given[name].shape) if name in given else "nothing"
            raise ProtocolError(
                f"TrainRequest: method: {CONTROL}/{name}: found {found}, expected {tuple(flat.shapes[name])}"
            )
    return flat.flatten_trained(given)


class Scaffold(Corrected):
    """theta + server_lr * mean update; memory is the server's control variate c.

    Option II of the paper, c_k+ = c_k - c - update_k / (K_k eta) after K_k steps of size eta. All of it
    follows from the update and the number of steps, so the sites' variates stay where they are: upload is
    FedAvg's, download is twice FedAvg's. With all sites in every round c is the mean of all c_k.
    A reply without its steps (Flower's own convention) counts in the mean and leaves c as it was.
    """

    asks = ASKS["scaffold"]
    name = ScaffoldSite.name
    traits = replace(Corrected.traits, requires="control variates in the sites' steps")

    def __init__(self, server_lr: float = 1.0, **flower: Any) -> None:
        super().__init__(**flower)
        if not server_lr > 0:
            raise ValueError(f"server_lr: found {server_lr}, allowed above 0")
        self.server_lr = server_lr
        self.local_lr: float | None = None
        """Size of a local step; None under Flower's own start()."""

    def attach(self, run: RunContext) -> None:
        super().attach(run)
        self.local_lr = run.experiment.learner.optimizer.lr

    def ordered(self, request: TrainRequest, last: int) -> TrainRequest:
        tensors = {**(request.method or {}), **add_prefix(CONTROL, self.memory)}
        return replace(super().ordered(request, last), method=Tensors(tensors))

    def aggregator(self, ctx: RoundContext) -> Aggregator:
        return ControlledMean(ctx, self)


class ControlledMean(CorrectedMean):
    """The mean update, and the mean step of the sites that report how many they made."""

    def __init__(self, ctx: RoundContext, method: Scaffold) -> None:
        super().__init__(ctx, method)
        self._scaffold = method
        self._zeros = make_parameter_zeros(ctx.reference)
        # one sum for both, so that a reply is in both of them or in neither
        self.sum = ExactSum({**ctx.reference, **add_prefix(PER_STEP, self._zeros)}, ctx.sum_grid())
        self._reporting = 0

    def add(self, reply: Admitted) -> None:
        reports = reply.steps > 0 and self._scaffold.local_lr is not None and not reply.stand_in
        zeros = self._zeros
        per_step = {name: reply.update[name] / reply.steps for name in zeros} if reports else zeros
        super().add(replace(reply, update={**reply.update, **add_prefix(PER_STEP, per_step)}))
        self._reporting += reports

    def moved(self) -> dict[str, Tensor]:
        total, memory, local_lr = self.sum.value(), self.corrected.memory, self._scaffold.local_lr
        if self._reporting and local_lr is not None:
            sites = len(self.corrected.population)
            for name, drift in extract_prefixed(PER_STEP, total).items():
                change = memory[name].double() * self._reporting + drift / local_lr
                memory[name].sub_((change / sites).to(memory[name].dtype))
        step = self._scaffold.server_lr
        return {
            name: (tensor + total[name] * ((1.0 if is_statistic(name) else step) / len(self.sum))).to(
                tensor.dtype
            )
            for name, tensor in self.ctx.reference.items()
        }
