"""SplitFed: the first layers belong to the sites, the rest to the server.

Thapa et al. 2022 (arXiv 2004.12088).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from flwr.serverapp import Grid
from torch import Tensor

from perennial.baselines.serial import Serial
from perennial.foundation.streams import stream
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.outcome import RoundOutcome
from perennial.strategies.round.parallel import parallel_round
from perennial.strategies.round.request import RoundRequest
from perennial.strategies.round.traits import Traits
from perennial.strategies.sums.exact_sum import ExactSum


class SplitFed(Serial):
    """The models that SplitFed arrives at, computed by sending whole models.

    v1: the server trains one copy of its part with each site in parallel and averages the copies; the same
    weights on both parts make that FedAvg. v2: the server has one part, which goes from site to site in a
    random order and is never averaged; the sites' parts, which are their first layers, are averaged by
    samples. Only the arithmetic is SplitFed's: a deployment of the real protocol would send activations and
    labels in the clear with every batch.
    """

    def __init__(
        self, version: Literal["v1", "v2"] = "v2", max_update_norm: float | None = None, **flower: Any
    ) -> None:
        super().__init__(max_update_norm, **flower)
        self.version = version
        cut = "a model that is cut between the sites and the server"
        self.traits = replace(Serial.traits if version == "v2" else Traits(), requires=cut)

    def admit_hop(self, reply: Admitted) -> None:
        # here, where an update that does not fit is dropped by its site's name
        self._sites_sum.add(reply.update, self.weight(reply), reply.norm)

    def train_round(self, grid: Grid, request: RoundRequest) -> RoundOutcome:
        if self.version == "v1":
            return parallel_round(self, self.context(grid, request))
        ours = self.server_part(request.arrays)
        outcome = RoundOutcome()
        sites_part = {name: t for name, t in request.arrays.items() if name not in ours}
        self._sites_sum = sites_sum = ExactSum(
            sites_part, request.sums.grid(request.most_replies, self.largest_sum_weight(request))
        )
        server: Mapping[str, Tensor] = {name: request.arrays[name] for name in ours}
        names = sorted(request.sites)
        order = stream(self.run.experiment.seed, "serial-order", request.stamp.round).permutation(len(names))
        for index in order.tolist():
            after = self.hop(grid, request, names[index], {**request.arrays, **server}, outcome)
            if after is not None:
                server = {name: after[name] for name in ours}
        if len(outcome.participants) >= request.quorum:
            merged = {**sites_sum.added_to(sites_part), **server}
            outcome.arrays = {name: merged[name] for name in request.arrays}
        outcome.details["order"] = [names[index] for index in order.tolist()]
        return outcome

    @staticmethod
    def server_part(arrays: Mapping[str, Tensor]) -> frozenset[str]:
        """Names of the tensors behind the first layer."""
        first = next(iter(arrays)).rpartition(".")[0] + "."
        return frozenset(name for name in arrays if not name.startswith(first))
