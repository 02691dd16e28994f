"""FedPerC: sites that are alike learn together, and each keeps layers of its own.

Each task begins with rounds in which all sites train one global model by the base strategy. Then the sites
report how often its channels are silent on their data, and sites with similar vectors form a cluster. In the
remaining rounds the base strategy aggregates each cluster's shared layers; personal layers stay at their
sites. Yang, Huang, Shi and Cai 2022 (doi 10.18293/SEKE2022-100), algorithm 1.

The printed algorithm adds up the shared layers of a cluster without dividing; the base strategy's weighted
mean is used, as in FedPer (Arivazhagan et al. 2019, arXiv 1912.00818).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid
from torch import Tensor

from perennial.config import charges
from perennial.config.evaluation import count_noise
from perennial.config.strategies import ASKS
from perennial.foundation.errors import ConfigError, PrivacyError
from perennial.models.layers import batch_norm_layers, select_layers
from perennial.models.sparsity import Combine
from perennial.protocol.messages import TrainRequest
from perennial.protocol.tensors import Tensors
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.clusters.aggregation import ClusterAggregation, Model
from perennial.strategies.clusters.clustering import adjusted_rand, two_directions
from perennial.strategies.clusters.grouping import Grouping, Rule
from perennial.strategies.clusters.personal_models import OwnAccuracy, complete_personal_models
from perennial.strategies.clusters.site_vectors import VectorSettings
from perennial.strategies.round.disclosures import Disclosures
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.nested_state import nested, part
from perennial.strategies.round.outcome import RoundOutcome
from perennial.strategies.round.request import Arrays, RoundRequest, TaskStart
from perennial.strategies.round.services import Services
from perennial.strategies.wrapper import Wrapper


class ClusteredPersonalisation(Wrapper):
    """base aggregates: all sites in the global rounds, then the shared layers of each cluster.

    global_rounds: of each task, or one number for all; the task's other rounds are personal.
    clusters: how many, or auto. grouping: by sparsity vectors (k-means, or PFA's threshold), random, or fixed
    as groups, lists of site names; groups beside another rule only measure how well it finds them.
    standardise: entries of the vectors count by how much they differ between sites.
    personal: layers that stay at the sites: modules, tensors or wildcards; none is PFA, all is fine-tuning.
    batch_norm: shared, as other layers, or local: these layers stay at the sites too, statistics and weights.
    channels, layers, combine, channel_choice, extractor: what a sparsity vector is made of (VectorSettings).
    By default that is every channel of the last ReLU call; the paper averages the first: combine: average.
    sparsity_epsilon, sparsity_delta: of the noise on each vector; None: no noise, and no claim.
    """

    asks = ASKS["clustered_personalisation"]
    needs = "sites that keep layers of their own, and sparsity vectors where groups are found by them"

    def __init__(
        self,
        base: IncrementalStrategy,
        global_rounds: int | list[int],
        clusters: int | Literal["auto"] = "auto",
        grouping: Rule = "sparsity",
        groups: list[list[str]] | None = None,
        standardise: bool = False,
        personal: tuple[str, ...] = ("head",),
        batch_norm: Literal["shared", "local"] = "shared",
        channels: int | None = None,
        layers: int | None = None,
        combine: Combine = "last",
        channel_choice: Literal["seeded", "variance"] = "seeded",
        extractor: str = "global",
        sparsity_epsilon: float | None = None,
        sparsity_delta: float = 1e-5,
        max_update_norm: float | None = None,
    ) -> None:
        bounds = [bound for bound in (max_update_norm, base.max_update_norm) if bound is not None]
        super().__init__(base, min(bounds, default=None))
        if not base.combines_replies or not base.serves_groups:
            raise ValueError(
                f"base: {type(base).__name__} serves all sites at once and cannot work in one cluster beside "
                "others; allowed: a strategy that combines replies, such as fedavg"
            )
        if min([global_rounds] if isinstance(global_rounds, int) else global_rounds, default=0) < 0:
            raise ValueError(f"global_rounds: found {global_rounds}, allowed 0 or more")
        if any(number is not None and number < 1 for number in (channels, layers)):
            raise ValueError(f"channels, layers: found {channels}, {layers}; allowed 1 or more")
        if sparsity_epsilon is not None and not (sparsity_epsilon > 0 and 0 < sparsity_delta < 1):
            raise ValueError(
                f"sparsity_epsilon, sparsity_delta: found {sparsity_epsilon}, {sparsity_delta}; "
                "allowed above 0, and between 0 and 1"
            )
        self.combines_replies = False
        self._global_rounds = global_rounds
        self._patterns = personal
        self._personal: tuple[str, ...] = ()
        self._own_batch_norm = batch_norm == "local"
        self._vectors = VectorSettings(
            channels,
            layers,
            combine,
            channel_choice == "variance",
            sparsity_epsilon,
            sparsity_delta,
            extractor,
        )
        self._grouping = Grouping(grouping, clusters, groups, self._vectors, standardise)
        self._services: Services | None = None
        self._global: Mapping[str, Tensor] = {}
        self._in_personal_phase = False
        self._phase_task = 0
        self._clusters = ClusterAggregation(base, self._grouping)
        self._accuracy = OwnAccuracy()

    # before anything starts

    def attach(self, services: Services) -> None:
        """Raises ConfigError or PrivacyError when the settings do not fit the experiment."""
        self._services = services
        super().attach(services)
        experiment = services.experiment
        self._grouping.check_sites(experiment.data.sites)
        for task, rounds in enumerate(services.schedule.rounds, start=1):
            if self._rounds_of_global(task) > rounds:
                raise ConfigError(
                    f"strategy.global_rounds: found {self._rounds_of_global(task)} in task {task}, which has "
                    f"{rounds} rounds; allowed 0 to {rounds}"
                )

    def disclosures(self) -> Disclosures:
        """What the base discloses, and the sparsity vectors where groups are found by them."""
        protection = "none" if self._vectors.epsilon is None else "sample"
        needed = self._grouping.needs_vectors
        return replace(super().disclosures(), sparsity=protection if needed else None)

    def begin_task(self, task: TaskStart) -> None:
        self._personal = self._personal_of(task.reference)
        self.check_layers(self._shared(task.reference))
        if self._services is not None and self._grouping.needs_vectors:
            network = self._vectors.network(self._services, task.reference)
            self._vectors.measurable(network, self._services.input_shape)
        super().begin_task(task)

    def largest_weight(self) -> float:
        """Raises PrivacyError: the models of the clusters never get the server's noise."""
        raise PrivacyError(
            f"strategy: {type(self).__name__} gives each cluster a model of its own, and the server's noise "
            "is added to the global one alone; privacy.mode client_central goes with fedavg"
        )

    # a round, whose exchange is this strategy's own

    configure_train = IncrementalStrategy.configure_train

    def train_round(self, grid: Grid, request: RoundRequest) -> RoundOutcome:
        """A global round, or one round of every cluster; a task's last round completes the sites' models."""
        self._global = request.arrays
        self._in_personal_phase = self._round_in_task(request) > self._rounds_of_global(request.stamp.task)
        if not self._in_personal_phase:
            return IncrementalStrategy.train_round(self, grid, request)
        up, down = self._exchange.bytes_up, self._exchange.bytes_down
        warnings = self._group(grid, request)
        members = {site: node for site, node in request.sites.items() if site in self._grouping.labels}
        outcome = IncrementalStrategy.train_round(self, grid, replace(request, sites=members))
        outcome.absent += [site for site in request.sites if site not in members]
        outcome.warnings += warnings
        outcome.details["clusters"] = {site: self._grouping.labels[site] for site in members}
        self._complete(grid, replace(request, sites=members), outcome)
        outcome.bytes_up += self._exchange.bytes_up - up
        outcome.bytes_down += self._exchange.bytes_down - down
        return outcome

    def prepare_round(self, grid: Grid, request: RoundRequest, outcome: RoundOutcome) -> None:
        super().prepare_round(grid, request, outcome)
        if self._in_personal_phase:
            self._clusters.prepare_round(grid, request, outcome)

    def requests(self, request: TrainRequest, sites: Sequence[str]) -> dict[str, TrainRequest]:
        if not self._in_personal_phase:
            return super().requests(request, sites)
        made: dict[str, TrainRequest] = {}
        members = self._grouping.by_cluster(sites)
        for cluster, some in members.items():
            arrays, personal = Tensors(self._sent(cluster)), list(self._personal)
            theirs = replace(request, arrays=arrays, personal=personal)
            made |= self._clusters.requests(cluster, theirs, some)
        return made

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        if self._in_personal_phase:
            # the gate admits updates of exactly these tensors: a personal layer in a reply is refused
            self.reference = self._shared(self._global)
        return IncrementalStrategy.aggregate_train(self, server_round, replies)

    def begin_round(self) -> None:
        if not self._in_personal_phase:
            super().begin_round()
        else:
            self._clusters.begin_round(self)

    def while_waiting(self) -> None:
        if self._in_personal_phase:
            self._clusters.while_waiting()
        else:
            super().while_waiting()

    def fold(self, reply: Admitted) -> None:
        if not self._in_personal_phase:
            super().fold(reply)
        else:
            self._clusters.fold(reply)

    def close_round(self) -> int:
        """Answers in all clusters; a cluster without one keeps its model."""
        if not self._in_personal_phase:
            return super().close_round()
        return self._clusters.close_round(self.outcome)

    def finish_round(self) -> Model:
        """The new global model; in the personal phase the global model stays, and the clusters' move."""
        if not self._in_personal_phase:
            return super().finish_round()
        if details := self._clusters.finish_round():
            self.outcome.details["in_clusters"] = details
        return dict(self._global)

    # the personal phase

    def _personal_of(self, arrays: Mapping[str, Tensor]) -> tuple[str, ...]:
        """In order of name. Raises ConfigError when a setting names no layer of the model."""
        named = select_layers(self._patterns, arrays)
        if not self._own_batch_norm:
            return tuple(sorted(named))
        normalising = batch_norm_layers(arrays)
        if not normalising:
            raise ConfigError(
                "strategy.batch_norm: found local, but the model has no batch normalisation; allowed: shared"
            )
        return tuple(sorted({*named, *normalising}))

    def _shared(self, arrays: Mapping[str, Tensor]) -> Model:
        personal = set(self._personal)
        return {name: tensor for name, tensor in arrays.items() if name not in personal}

    def _sent(self, cluster: int) -> Model:
        """The cluster's shared layers; the global model's personal ones, for sites without their own."""
        return {**self._global, **self._clusters.models[cluster]}

    def _group(self, grid: Grid, request: RoundRequest) -> list[str]:
        """Clusters for all sites of the round, and a model for each cluster; returns the operator's notes."""
        assert self._services is not None
        notes: list[str] = []
        task, schedule = request.stamp.task, self._services.schedule
        starting = self._phase_task != task
        before = dict(self._grouping.labels)
        self._grouping.assign(grid, self._exchange, request, self._services, anew=starting, notes=notes)
        if starting and self._grouping.labels:
            self._begin_phase(task, schedule.classes_of(task), before)
        return sorted(notes)

    def _begin_phase(self, task: int, classes: range, before: Mapping[str, int]) -> None:
        """Start the shared layers from the global model, or else from the previous task's.

        The latter in a task without global rounds.
        """
        assert self._services is not None
        start = TaskStart(
            task, classes.stop, classes, self._shared(self._global), tuple(self._grouping.labels)
        )
        own = {name: self._global[name] for name in self._personal}
        carried = before if self._rounds_of_global(task) == 0 else None
        self._clusters.begin_phase(self._services, start, own, carried)
        self._phase_task = task

    def _complete(self, grid: Grid, request: RoundRequest, outcome: RoundOutcome) -> None:
        """After the last round of a task, or after each where every round is measured."""
        assert self._services is not None
        task, schedule = request.stamp.task, self._services.schedule
        last = self._round_in_task(request) == schedule.rounds[task - 1]
        if not self._clusters.models or not (last or self._services.experiment.evaluation.every == "round"):
            return
        experiment, releases = self._services.experiment, self._services.releases
        noise = count_noise(experiment)
        if noise is not None and releases is not None:
            charge = [charges.evaluation(experiment, request.stamp.run)]
            releases.asked(request.stamp.round, request.sites, charge)
        accuracies = complete_personal_models(
            grid,
            self._exchange,
            request,
            {cluster: self._sent(cluster) for cluster in self._clusters.models},
            {site: self._grouping.labels[site] for site in request.sites},
            self._personal,
            lambda site, reason: outcome.warnings.append(f"site {site}: own model: {reason}"),
            noise,
        )
        mean = self._accuracy.add(accuracies, request.stamp.round, task)
        outcome.details["personalised_accuracy"] = mean

    def _round_in_task(self, request: RoundRequest) -> int:
        """From 1."""
        assert self._services is not None
        return request.stamp.round - sum(self._services.schedule.rounds[: request.stamp.task - 1])

    def _rounds_of_global(self, task: int) -> int:
        if isinstance(self._global_rounds, int):
            return self._global_rounds
        if task > len(self._global_rounds):
            raise ConfigError(
                f"strategy.global_rounds: found {len(self._global_rounds)} numbers, and none for task {task}"
            )
        return self._global_rounds[task - 1]

    # what is left

    def group_models(self) -> dict[str, Arrays]:
        return {str(cluster): model for cluster, model in self._clusters.models.items()}

    def summary_blocks(self) -> dict[str, Any]:
        """The blocks of summary.json about clusters and personal models.

        clusters: each site's vector and cluster.
        personalised_accuracy: of each site after each task.
        personalisation: figures of the whole run.
        """
        labels, vectors = self._grouping.labels, self._grouping.vectors
        blocks: dict[str, Any] = super().summary_blocks()
        if len(vectors) > 1:
            blocks["clusters"] = {
                site: {"x": x, "y": y, "cluster": str(labels[site])}
                for site, (x, y) in two_directions(vectors).items()
                if site in labels
            }
        reported = self._accuracy.reported
        if reported:
            blocks["personalised_accuracy"] = dict(sorted(self._accuracy.by_site.items()))
        if labels:
            truth = self._grouping.truth
            blocks["personalisation"] = {
                "clusters": len(set(labels.values())),
                "members": dict(sorted(labels.items())),
                "adjusted_rand": adjusted_rand(labels, truth) if truth else None,
                "accuracy": reported[-1] if reported else None,
                "best_accuracy": max(reported, default=None),
                "rounds": self._accuracy.by_round,
                "sparsity_epsilon": self._vectors.epsilon if self._grouping.needs_vectors else None,
                "personal": list(self._personal),
            }
        return blocks

    def state_dict(self) -> dict[str, Any]:
        return {
            "phase_task": self._phase_task,
            "personal": list(self._personal),
            "accuracy": self._accuracy.by_site,
            "by_round": self._accuracy.by_round,
            **self._clusters.state_dict(),
            **nested("grouping", self._grouping.state_dict()),
            **super().state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._phase_task, self._personal = state["phase_task"], tuple(state["personal"])
        self._accuracy.by_site, self._accuracy.by_round = state["accuracy"], state["by_round"]
        self._grouping.load_state_dict(part("grouping", state))
        super().load_state_dict(state)
        if self._services is not None:
            self._clusters.load_state_dict(self._services, state)
