"""The base of SCAFFOLD, FedDyn and AdaBest: corrections at the sites, and one vector at the server.

Sites count alike, each site corrects its gradients by a vector of its own, and the server keeps one vector of
the model's shape across rounds.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from perennial.models.growth import grown
from perennial.protocol.messages import TrainRequest
from perennial.strategies.fedavg import FedAvg, WeightedMean
from perennial.strategies.round.context import RoundContext
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.nested_state import nested, part
from perennial.strategies.round.request import Arrays, RoundRequest, TaskStart, with_settings
from perennial.strategies.round.traits import Traits
from perennial.strategies.sums.parameters import parameter_zeros


class Corrected(FedAvg):
    """Uniform mean of the sites' models, with a server vector and corrections at the sites.

    memory: name -> tensor, the server's vector; a subclass says what it means. population: every site that
    was connected at a task's start or has ever answered. folded: site -> its last round that memory includes;
    the next request says so, and the site rolls back what it stored for lost ones.
    """

    traits = Traits(accepts_scaled_updates=False)

    def __init__(self, max_update_norm: float | None = None, **flower: Any) -> None:
        super().__init__(max_update_norm, **flower)
        self.memory: dict[str, Tensor] = {}
        self.population: set[str] = set()
        self.folded: dict[str, int] = {}

    # what a method changes

    def correction(self) -> dict[str, Any]:
        """The correction's name and strength, as requests carry them to the sites."""
        raise NotImplementedError

    def beginning(self, arrays: Arrays) -> dict[str, Tensor]:
        """First values of the server's vector, for new classes too. arrays: the model's."""
        return parameter_zeros(arrays)

    # the rest follows

    def begin_task(self, task: TaskStart) -> None:
        self.memory = grown(self.memory, self.beginning(task.reference))
        self.population |= set(task.sites)

    def requests(self, request: TrainRequest, sites: Sequence[str]) -> dict[str, TrainRequest]:
        last = {site: self.folded.get(site, 0) for site in sites}
        # one object for all sites that get the same message, so that a model is serialised once for a round
        made = {number: self.ordered(request, number) for number in sorted(set(last.values()))}
        return {site: made[last[site]] for site in sites}

    def ordered(self, request: TrainRequest, last: int) -> TrainRequest:
        """The request with the correction and `last`, the site's last round that memory includes."""
        return with_settings(request, correction={**self.correction(), "folded": last})

    def weight(self, reply: Admitted) -> float:
        return 1.0

    def largest_sum_weight(self, request: RoundRequest) -> float:
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        return {
            "population": sorted(self.population),
            "folded": self.folded,
            **nested("memory", self.memory),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.population, self.folded = set(state["population"]), dict(state["folded"])
        self.memory = part("memory", state)


class CorrectedMean(WeightedMean):
    """The uniform mean of a round, by which a subclass moves the model and the server's vector."""

    def __init__(self, ctx: RoundContext, corrected: Corrected) -> None:
        super().__init__(ctx, corrected)
        self.corrected = corrected
        self._answered: dict[str, int] = {}
        # under Flower's own start() no task begins
        corrected.memory = grown(corrected.memory, corrected.beginning(ctx.reference))

    def add(self, reply: Admitted) -> None:
        super().add(reply)
        self.corrected.population.add(reply.site)
        if not reply.stand_in:
            self._answered[reply.site] = reply.base_round

    def result(self) -> dict[str, Tensor]:
        # a round without a quorum has no result, and its replies count as lost
        self.corrected.folded |= self._answered
        return self.moved()

    def moved(self) -> dict[str, Tensor]:
        """Move the server's vector, and return the new global model."""
        raise NotImplementedError
