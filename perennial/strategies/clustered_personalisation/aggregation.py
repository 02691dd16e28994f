"""The models of clusters, each aggregated by a base strategy of its own."""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from flwr.serverapp import Grid
from torch import Tensor

from perennial.foundation.errors import ProtocolError
from perennial.models.layers import append_rows
from perennial.privacy.noised_counts import CountNoise
from perennial.protocol.messages import PersonalModelReply, PersonalModelRequest, TrainRequest
from perennial.protocol.tensors import Tensors
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.clustered_personalisation.grouping import Grouping
from perennial.strategies.round.context import Aggregator, RoundContext, RunContext
from perennial.strategies.round.exchange import Exchange, ask, check_possible, check_withheld
from perennial.strategies.round.gate import Admitted, Rejected
from perennial.strategies.round.request import Arrays, RoundRequest, TaskStart, add_prefix, extract_prefixed

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
        self._strategies: dict[int, IncrementalStrategy] = {}

    def begin_phase(
        self,
        services: RunContext,
        task: TaskStart,
        own: Arrays,
        before: Mapping[str, int] | None,
    ) -> None:
        """Begin a task's personal phase with the clusters that the grouping has found.

        task: of all sites; its reference has the shared layers, from which clusters start. own: the other
        layers. before: site -> its cluster of the task before, if clusters go on from what they learnt there;
        None: they do not.
        """
        members: dict[int, list[str]] = {}
        for site, cluster in sorted(self._grouping.labels.items()):
            members.setdefault(cluster, []).append(site)
        carried = {} if before is None else {s: self.models[c] for s, c in before.items() if c in self.models}
        self.models = {
            cluster: _mean_with_rows([carried[s] for s in sites if s in carried], task.reference)
            for cluster, sites in sorted(members.items())
        }
        former = {cluster: self._find_former(sites, before or {}) for cluster, sites in members.items()}
        self._strategies = {
            cluster: self._build_strategy(services, own, former[cluster]) for cluster in self.models
        }
        for cluster, aggregator in self._strategies.items():
            aggregator.begin_task(
                replace(task, reference=self.models[cluster], sites=tuple(members[cluster]))
            )

    def requests(self, cluster: int, request: TrainRequest, sites: Sequence[str]) -> dict[str, TrainRequest]:
        """The requests that a cluster's strategy makes of a plain one for its sites."""
        return self._strategies[cluster].requests(request, sites)

    def aggregator(self, ctx: RoundContext, global_model: Arrays) -> Aggregator:
        """The aggregator of a round of all clusters, whose result is global_model, unchanged."""
        parts: dict[int, Aggregator] = {}
        for cluster, strategy in self._strategies.items():
            own = ctx.part(self.models[cluster], self._grouping.list_members(cluster))
            strategy.prepare_round(own)
            parts[cluster] = strategy.aggregator(own)
        return InClusters(ctx, parts, self.models, self._grouping.labels, global_model)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed server needs."""
        state: dict[str, Any] = {"clusters": sorted(self.models)}
        for cluster, model in self.models.items():
            state |= add_prefix(f"model-{cluster}", model)
            state |= add_prefix(f"aggregator-{cluster}", self._strategies[cluster].state_dict())
        return state

    def load_state_dict(self, services: RunContext, state: Mapping[str, Any]) -> None:
        """Restore what state_dict() returned, after the base strategy of all sites has been restored."""
        self.models, self._strategies = {}, {}
        for cluster in state["clusters"]:
            self.models[cluster] = extract_prefixed(f"model-{cluster}", state)
            self._strategies[cluster] = self._build_strategy(services, own={}, former=None)
            self._strategies[cluster].load_state_dict(extract_prefixed(f"aggregator-{cluster}", state))

    def _find_former(self, sites: list[str], before: Mapping[str, int]) -> IncrementalStrategy | None:
        """Who served most of the sites in the task before, the lower cluster of equals."""
        served = Counter(sorted(before[site] for site in sites if before.get(site) in self._strategies))
        return self._strategies[served.most_common(1)[0][0]] if served else None

    def _build_strategy(
        self, services: RunContext, own: Arrays, former: IncrementalStrategy | None
    ) -> IncrementalStrategy:
        aggregator = copy.deepcopy(self._template)
        aggregator.attach(services)
        aggregator.serve_group(self._whole, own, former)
        return aggregator


class InClusters(Aggregator):
    """Gives each reply to the aggregator of its site's cluster; a cluster without replies keeps its model.

    models: of the clusters, updated in place. labels: site -> its cluster.
    """

    def __init__(
        self,
        ctx: RoundContext,
        parts: Mapping[int, Aggregator],
        models: dict[int, Model],
        labels: Mapping[str, int],
        global_model: Arrays,
    ) -> None:
        super().__init__(ctx)
        self._parts, self._models, self._labels, self._global = parts, models, labels, global_model
        self._answers: dict[int, int] = {}

    def while_waiting(self) -> None:
        for each in self._parts.values():
            each.while_waiting()

    def add(self, reply: Admitted) -> None:
        """Add one reply to its cluster. Raises Rejected if the site has no cluster."""
        cluster = self._labels.get(reply.site)
        if cluster is None:
            raise Rejected("a site without a cluster in the personal phase")
        self._parts[cluster].add(reply)

    def complete(self) -> int:
        """End the round's replies in all clusters; returns how many count."""
        outcome = self.ctx.outcome
        for cluster, each in self._parts.items():
            members, own = each.ctx.members or frozenset(), each.ctx.outcome
            own.participants = {s: reply for s, reply in outcome.participants.items() if s in members}
            own.dropped = [fault for fault in outcome.dropped if fault[0] in members]
            own.refused = [fault for fault in outcome.refused if fault[0] in members]
            self._answers[cluster] = each.complete()
        return sum(self._answers.values())

    def result(self) -> Model:
        """Update the models of clusters with replies, and return the global model unchanged."""
        details: dict[str, Any] = {}
        for cluster, each in self._parts.items():
            if self._answers[cluster]:
                self._models[cluster] = each.result()
            if each.ctx.outcome.details:
                details[str(cluster)] = each.ctx.outcome.details
        if details:
            self.ctx.outcome.details["in_clusters"] = details
        return dict(self._global)


def _mean_with_rows(models: list[Model], start: Arrays) -> Model:
    """The mean of models, with the rows that they lack from start; start itself where there are none."""
    if not models:
        return dict(start)
    return {
        name: append_rows(
            torch.stack([model[name].double() for model in models]).mean(dim=0).to(tensor.dtype), tensor
        )
        for name, tensor in start.items()
    }


def complete_personal_models(
    grid: Grid,
    exchange: Exchange,
    request: RoundRequest,
    models: Mapping[int, Mapping[str, Tensor]],
    clusters: Mapping[str, int],
    personal: tuple[str, ...],
    dropped: Callable[[str, str], None],
    noise: CountNoise | None = None,
) -> dict[str, float | None]:
    """Have sites complete their own models: site -> accuracy on its held-out samples, None if not reported.

    models: the tensors sent to each cluster, all of them. clusters: site -> cluster, of the sites to ask,
    which request.sites holds. personal: layers that are the site's own. dropped: called with (site, reason)
    for each site that fails. noise: that the experiment adds to the counts.
    """
    common = {
        **request.stamp.stamp_fields,
        "personal": list(personal),
    }
    messages: dict[str, PersonalModelRequest] = {}
    for cluster, model in models.items():
        members = [site for site, own in clusters.items() if own == cluster]
        for sites, fields in request.previous.group_fields(members):
            # one object for all sites that get the same message, so that it is serialised once
            message = PersonalModelRequest(**common, arrays=Tensors(model), **fields)
            messages |= dict.fromkeys(sites, message)
    replies = ask(
        grid,
        exchange,
        [(site, request.sites[site], messages[site]) for site in clusters],
        PersonalModelReply,
        request.deadline,
        dropped,
        lambda reply: _check(reply, noise),
    )
    return {site: _compute_accuracy(reply) for site, reply in replies.items()}


class OwnAccuracy:
    """Accuracies of the sites' own models.

    by_site: site -> accuracy after each task, None if it reported none.
    by_round: round, task and mean over sites, for each round that was measured.
    """

    def __init__(self) -> None:
        self.by_site: dict[str, list[float | None]] = {}
        self.by_round: list[dict[str, Any]] = []

    def add(self, accuracies: Mapping[str, float | None], number: int, task: int) -> float | None:
        """Note the accuracies of a round; returns their mean, None when no site reported one."""
        reported = [value for _, value in sorted(accuracies.items()) if value is not None]
        mean = sum(reported) / len(reported) if reported else None
        self.by_round.append({"round": number, "task": task, "accuracy": mean})
        for site, accuracy in accuracies.items():
            row = self.by_site.setdefault(site, [])
            row += [None] * (task - len(row))
            row[task - 1] = accuracy
        return mean

    @property
    def reported(self) -> list[float]:
        """The mean of each round in which a site reported an accuracy, in order."""
        return [entry["accuracy"] for entry in self.by_round if entry["accuracy"] is not None]


def _compute_accuracy(reply: PersonalModelReply) -> float | None:
    samples = sum(reply.total or [])
    # noise can bring any count below 0, and right answers above the samples
    return min(1.0, max(0.0, sum(reply.correct or []) / samples)) if samples > 0 else None


def _check(reply: PersonalModelReply, noise: CountNoise | None) -> None:
    reported: list[Any] = [reply.correct, reply.total]
    if reported == [None, None]:
        return
    if None in reported or not len(reported[0]) == len(reported[1]) == reply.num_classes:
        raise ProtocolError(f"PersonalModelReply: correct, total: allowed {reply.num_classes} counts each")
    correct, total = reported
    check_possible(correct, total, noise)
    check_withheld(reply.withheld, total)
