"""SCAFFOLD: control variates take each site's drift out of its steps.

Karimireddy et al. 2020 (arXiv 1910.06378).
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from perennial.config.strategies import ASKS
from perennial.foundation.errors import ConfigError
from perennial.protocol.messages import TrainRequest
from perennial.protocol.tensors import Tensors
from perennial.strategies.round.corrected import Corrected
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.services import Services
from perennial.strategies.sums.exact_sum import ExactSum
from perennial.strategies.sums.parameters import is_statistic, parameter_zeros, prefixed, unprefixed

PER_STEP = "per step"


class Scaffold(Corrected):
    """theta + server_lr * mean update; memory is the server's control variate c.

    Option II of the paper, c_k+ = c_k - c - update_k / (K_k eta) after K_k steps of size eta. All of it
    follows from the update and the number of steps, so the sites' variates stay where they are: upload is
    FedAvg's, download is twice FedAvg's. With all sites in every round c is the mean of all c_k.
    A reply without its steps (Flower's own convention) counts in the mean and leaves c as it was.
    """

    asks = ASKS["scaffold"]
    needs = "control variates in the sites' steps"

    def __init__(self, server_lr: float = 1.0, max_update_norm: float | None = None, **flower: Any) -> None:
        super().__init__(max_update_norm, **flower)
        if not server_lr > 0:
            raise ValueError(f"server_lr: found {server_lr}, allowed above 0")
        self.server_lr = server_lr
        self._local_lr: float | None = None

    def attach(self, services: Services) -> None:
        """Raises ConfigError for local steps that are not plain SGD of one size, which option II assumes."""
        optimizer = services.experiment.learner.optimizer
        for key, needed in (("name", "sgd"), ("momentum", 0.0), ("schedule", "constant")):
            found = getattr(optimizer, key)
            if found != needed:
                raise ConfigError(
                    f"learner.optimizer.{key}: found {found!r}; scaffold's control variates allow {needed!r}"
                )
        self._local_lr = optimizer.lr

    def correction(self) -> dict[str, Any]:
        return {"name": "scaffold"}

    def ordered(self, request: TrainRequest, last: int) -> TrainRequest:
        tensors = {**(request.method or {}), **prefixed("control", self.memory)}
        return replace(super().ordered(request, last), method=Tensors(tensors))

    def begin_round(self) -> None:
        super().begin_round()
        # one sum for both, so that a reply is in both of them or in neither
        together = {**self.reference, **prefixed(PER_STEP, parameter_zeros(self.reference))}
        self._sum = ExactSum(together, self.sum_grid())
        self._reporting = 0

    def fold(self, reply: Admitted) -> None:
        reports = reply.steps > 0 and self._local_lr is not None and not reply.stand_in
        zeros = parameter_zeros(self.reference)
        per_step = {name: reply.update[name] / reply.steps for name in zeros} if reports else zeros
        super().fold(replace(reply, update={**reply.update, **prefixed(PER_STEP, per_step)}))
        self._reporting += reports

    def moved(self) -> dict[str, Tensor]:
        total = self._sum.value()
        if self._reporting and self._local_lr is not None:
            sites = len(self.population)
            for name, drift in unprefixed(PER_STEP, total).items():
                change = self.memory[name].double() * self._reporting + drift / self._local_lr
                self.memory[name].sub_((change / sites).to(self.memory[name].dtype))
        return {
            name: (
                tensor + total[name] * ((1.0 if is_statistic(name) else self.server_lr) / len(self._sum))
            ).to(tensor.dtype)
            for name, tensor in self.reference.items()
        }
