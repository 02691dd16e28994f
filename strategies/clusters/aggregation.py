"""The models of clusters, each aggregated by a base strategy of its own."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from flwr.serverapp import Grid
from torch import Tensor

from perennial.models.layers import with_rows
from perennial.protocol.messages import TrainRequest
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.clusters.grouping import Grouping
from perennial.strategies.round.gate import Admitted, Rejected
from perennial.strategies.round.nested_state import nested, part
from perennial.strategies.round.outcome import RoundOutcome
from perennial.strategies.round.request import Arrays, RoundRequest, TaskStart
from perennial.strategies.round.services import Services

Model = dict[str, Tensor]


class ClusterAggregation:
    """Aggregates each cluster's updates with a strategy of its own.

    models: cluster -> its shared layers.
    whole: the base strategy of all sites, before it is attached; those of the clusters have its settings.
    """

    def __init__(self, whole: IncrementalStrategy, grouping: Grouping) -> None:
        self.models: dict[int, Model] = {}
        self._whole, self._template = whole, copy.deepcopy(whole)
        self._grouping = grouping
        self._aggregators: dict[int, IncrementalStrategy] = {}
        self._answers: dict[int, int] = {}

    def begin_phase(
        self,
        services: Services,
        task: TaskStart,
        own: Arrays,
        before: Mapping[str, int] | None,
    ) -> None:
        """A personal phase begins, with the clusters that the grouping has found.

        task: of all sites; its reference has the shared layers, from which clusters start. own: the other
        layers. before: site -> its cluster of the task before, where clusters go on from what they have
        learnt there.
        """
        members: dict[int, list[str]] = {}
        for site, cluster in sorted(self._grouping.labels.items()):
            members.setdefault(cluster, []).append(site)
        carried = {} if before is None else {s: self.models[c] for s, c in before.items() if c in self.models}
        self.models = {
            cluster: _mean_with_rows([carried[s] for s in sites if s in carried], task.reference)
            for cluster, sites in sorted(members.items())
        }
        former = {cluster: self._former(sites, before or {}) for cluster, sites in members.items()}
        self._aggregators = {
            cluster: self._aggregator(services, own, former[cluster]) for cluster in self.models
        }
        for cluster, aggregator in self._aggregators.items():
            aggregator.begin_task(
                replace(task, reference=self.models[cluster], sites=tuple(members[cluster]))
            )

    def prepare_round(self, grid: Grid, request: RoundRequest, outcome: RoundOutcome) -> None:
        """As a strategy's, for each cluster."""
        for cluster, aggregator in self._aggregators.items():
            aggregator.members = self._grouping.members(cluster)
            sites = {site: node for site, node in request.sites.items() if site in aggregator.members}
            aggregator.prepare_round(grid, replace(request, sites=sites), outcome)

    def requests(self, cluster: int, request: TrainRequest, sites: Sequence[str]) -> dict[str, TrainRequest]:
        """As a strategy's, for sites of one cluster."""
        return self._aggregators[cluster].requests(request, sites)

    def begin_round(self, outer: IncrementalStrategy) -> None:
        """A round of outer begins; warnings of the clusters are its own."""
        for cluster, aggregator in self._aggregators.items():
            own = RoundOutcome(warnings=outer.outcome.warnings)
            outer.begin_round_of(aggregator, self.models[cluster], own)

    def while_waiting(self) -> None:
        """As a strategy's, for each cluster."""
        for aggregator in self._aggregators.values():
            aggregator.while_waiting()

    def fold(self, reply: Admitted) -> None:
        """Take a reply into the aggregate of its site's cluster. Raises Rejected where it has none."""
        cluster = self._grouping.labels.get(reply.site)
        if cluster is None:
            raise Rejected("a site without a cluster in the personal phase")
        self._aggregators[cluster].fold(reply)

    def close_round(self, outcome: RoundOutcome) -> int:
        """No more replies come; returns how many there are in all clusters. outcome: of all sites."""
        for cluster, aggregator in self._aggregators.items():
            members, own = self._grouping.members(cluster), aggregator.outcome
            own.participants = {s: reply for s, reply in outcome.participants.items() if s in members}
            own.dropped = [fault for fault in outcome.dropped if fault[0] in members]
            own.refused = [fault for fault in outcome.refused if fault[0] in members]
            self._answers[cluster] = aggregator.close_round()
        return sum(self._answers[cluster] for cluster in self._aggregators)

    def finish_round(self) -> dict[str, Any]:
        """Move the clusters that have answers; returns what their strategies say of the round, by cluster."""
        details: dict[str, Any] = {}
        for cluster, aggregator in self._aggregators.items():
            if self._answers[cluster]:
                self.models[cluster] = aggregator.finish_round()
            if aggregator.outcome.details:
                details[str(cluster)] = aggregator.outcome.details
        return details

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed server needs."""
        state: dict[str, Any] = {"clusters": sorted(self.models)}
        for cluster, model in self.models.items():
            state |= nested(f"model-{cluster}", model)
            state |= nested(f"aggregator-{cluster}", self._aggregators[cluster].state_dict())
        return state

    def load_state_dict(self, services: Services, state: Mapping[str, Any]) -> None:
        """Restore state_dict(), after the base strategy of all sites has been restored."""
        self.models, self._aggregators = {}, {}
        for cluster in state["clusters"]:
            self.models[cluster] = part(f"model-{cluster}", state)
            self._aggregators[cluster] = self._aggregator(services, own={}, former=None)
            self._aggregators[cluster].load_state_dict(part(f"aggregator-{cluster}", state))

    def _former(self, sites: list[str], before: Mapping[str, int]) -> IncrementalStrategy | None:
        """Who served most of the sites in the task before, the lower cluster of equals."""
        served = Counter(sorted(before[site] for site in sites if before.get(site) in self._aggregators))
        return self._aggregators[served.most_common(1)[0][0]] if served else None

    def _aggregator(
        self, services: Services, own: Arrays, former: IncrementalStrategy | None
    ) -> IncrementalStrategy:
        aggregator = copy.deepcopy(self._template)
        aggregator.attach(services)
        aggregator.serve_group(self._whole, own, former)
        return aggregator


def _mean_with_rows(models: list[Model], start: Arrays) -> Model:
    """The mean of models, with the rows that they lack from start; start itself where there are none."""
    if not models:
        return dict(start)
    return {
        name: with_rows(
            torch.stack([model[name].double() for model in models]).mean(dim=0).to(tensor.dtype), tensor
        )
        for name, tensor in start.items()
    }
