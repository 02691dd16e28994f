"""FedPerC: sites that are alike learn together, and each keeps layers of its own.

Each task begins with rounds in which all sites train one global model by the base strategy. Then the sites
report how often its channels are silent on their data, and sites with similar vectors form a cluster. In the
remaining rounds the base strategy aggregates each cluster's shared layers; personal layers stay at their
sites. Yang, Huang, Shi and Cai 2022 (doi 10.18293/SEKE2022-100), algorithm 1.

The printed algorithm adds up the shared layers of a cluster without dividing; the base strategy's weighted
mean is used, as in FedPer (Arivazhagan et al. 2019, arXiv 1912.00818).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from flwr.serverapp import Grid
from torch import Tensor

from perennial.config import charges
from perennial.config.evaluation import count_noise
from perennial.config.strategies import ASKS
from perennial.foundation.errors import ConfigError
from perennial.models.layers import select_layers
from perennial.models.sparsity import Combine, VectorSettings
from perennial.protocol.messages import TrainRequest
from perennial.protocol.tensors import Tensors
from perennial.strategies.base import IncrementalStrategy, Wrapper
from perennial.strategies.clustered_personalisation.aggregation import (
    ClusterAggregation,
    Model,
    OwnAccuracy,
    complete_personal_models,
)
from perennial.strategies.clustered_personalisation.clustering import compute_adjusted_rand, project_to_plane
from perennial.strategies.clustered_personalisation.grouping import Grouping, Rule
from perennial.strategies.clustered_personalisation.site import PERSONAL, USUAL_PERSONAL
from perennial.strategies.fedavg import FedAvg
from perennial.strategies.round.context import Aggregator, RoundContext, RoundOutcome, RunContext
from perennial.strategies.round.parallel import run_parallel_round
from perennial.strategies.round.request import (
    Arrays,
    Disclosures,
    RoundRequest,
    TaskStart,
    Traits,
    add_prefix,
    add_settings,
    extract_prefixed,
)


class ClusteredPersonalisation(Wrapper):
    """base aggregates: all sites in the global rounds, then the shared layers of each cluster.

    global_rounds: of each task, or one number for all; the task's other rounds are personal.
    clusters: how many, or auto. grouping: by sparsity vectors (k-means, or PFA's threshold), random, or fixed
    as groups, lists of site names; groups beside another rule only measure how well it finds them.
    personal: layers that stay at the sites: modules, tensors or wildcards; none is PFA, all is fine-tuning.
    channels, layers, combine: what a sparsity vector is made of (VectorSettings).
    By default that is every channel of the last ReLU call; the paper averages the first: combine: average.
    sparsity_epsilon: of the noise on each vector, at delta 1e-5; None: no noise, and no claim.
    """

    asks = ASKS["clustered_personalisation"]

    def __init__(
        self,
        base: IncrementalStrategy,
        global_rounds: int | list[int],
        clusters: int | Literal["auto"] = "auto",
        grouping: Rule = "sparsity",
        groups: list[list[str]] | None = None,
        personal: tuple[str, ...] = USUAL_PERSONAL,
        channels: int | None = None,
        layers: int | None = None,
        combine: Combine = "last",
        sparsity_epsilon: float | None = None,
    ) -> None:
        super().__init__(base)
        if not base.traits.aggregates_in_parallel or not base.traits.runs_per_cluster:
            raise ValueError(
                f"base: {type(base).__name__} serves all sites at once and cannot work in one cluster beside "
                "others; allowed: a strategy that combines replies, such as fedavg"
            )
        if min([global_rounds] if isinstance(global_rounds, int) else global_rounds, default=0) < 0:
            raise ValueError(f"global_rounds: found {global_rounds}, allowed 0 or more")
        if any(number is not None and number < 1 for number in (channels, layers)):
            raise ValueError(f"channels, layers: found {channels}, {layers}; allowed 1 or more")
        if sparsity_epsilon is not None and not sparsity_epsilon > 0:
            raise ValueError(f"sparsity_epsilon: found {sparsity_epsilon}, allowed above 0")
        self._global_rounds = global_rounds
        self._patterns = personal
        self._personal: tuple[str, ...] = ()
        self._vectors = VectorSettings(channels, layers, combine, sparsity_epsilon)
        self._grouping = Grouping(grouping, clusters, groups, self._vectors)
        self._global: Mapping[str, Tensor] = {}
        self._in_personal_phase = False
        self._phase_task = 0
        self._clusters = ClusterAggregation(base, self._grouping)
        self._accuracy = OwnAccuracy()

    def adapted(self, base: Traits) -> Traits:
        layers = "sites that keep layers of their own, and sparsity vectors where groups are found by them"
        return replace(base, aggregates_in_parallel=False, requires=layers)

    # before anything starts

    def attach(self, run: RunContext) -> None:
        """Begin a run. Raises ConfigError or PrivacyError when the settings do not fit the experiment."""
        super().attach(run)
        self._grouping.check_sites(run.experiment.data.sites)
        for task, rounds in enumerate(run.schedule.rounds, start=1):
            if self._count_global_rounds(task) > rounds:
                raise ConfigError(
                    f"strategy.global_rounds: found {self._count_global_rounds(task)} in task "
                    f"{task}, which has {rounds} rounds; allowed 0 to {rounds}"
                )

    def disclosures(self) -> Disclosures:
        """The base's disclosures, with sparsity vectors if they decide the groups."""
        protection = "none" if self._vectors.epsilon is None else "sample"
        needed = self._grouping.needs_vectors
        return replace(super().disclosures(), sparsity=protection if needed else None)

    def begin_task(self, task: TaskStart) -> None:
        self._personal = tuple(sorted(select_layers(self._patterns, task.reference)))
        self.check_layers(self._shared(task.reference))
        if self.attached and self._grouping.needs_vectors:
            self._vectors.build_whole_plan(self.run.load(task.reference), self.run.input_shape)
        super().begin_task(task)

    # one round

    def train_round(self, grid: Grid, request: RoundRequest) -> RoundOutcome:
        """Run a global round or a round of every cluster; a task's last one completes the sites' models."""
        self._global = request.arrays
        self._in_personal_phase = self._round_in_task(request) > self._count_global_rounds(request.stamp.task)
        if not self._in_personal_phase:
            return run_parallel_round(self, self.build_context(grid, request))
        exchange = self.exchange
        up, down = exchange.bytes_up, exchange.bytes_down
        warnings = self._group(grid, request)
        members = {site: node for site, node in request.sites.items() if site in self._grouping.labels}
        ctx = self.build_context(grid, replace(request, sites=members))
        # the gate admits updates of exactly these tensors: a personal layer in a reply is refused
        ctx.reference = self._shared(self._global)
        outcome = run_parallel_round(self, ctx)
        outcome.absent += [site for site in request.sites if site not in members]
        outcome.warnings += warnings
        outcome.details["clusters"] = {site: self._grouping.labels[site] for site in members}
        self._complete(grid, ctx.request, outcome)
        outcome.bytes_up += exchange.bytes_up - up
        outcome.bytes_down += exchange.bytes_down - down
        return outcome

    def requests(self, request: TrainRequest, sites: Sequence[str]) -> dict[str, TrainRequest]:
        if not self._in_personal_phase:
            return super().requests(request, sites)
        made: dict[str, TrainRequest] = {}
        members = self._grouping.group_by_cluster(sites)
        for cluster, some in members.items():
            theirs = replace(request, arrays=Tensors(self._sent(cluster)))
            theirs = add_settings(theirs, **{PERSONAL: list(self._personal)})
            made |= self._clusters.requests(cluster, theirs, some)
        return made

    def aggregator(self, ctx: RoundContext) -> Aggregator:
        if self._in_personal_phase:
            return self._clusters.aggregator(ctx, self._global)
        return super().aggregator(ctx)

    # the personal phase

    def _shared(self, arrays: Mapping[str, Tensor]) -> Model:
        personal = set(self._personal)
        return {name: tensor for name, tensor in arrays.items() if name not in personal}

    def _sent(self, cluster: int) -> Model:
        """The cluster's shared layers; the global model's personal ones, for sites without their own."""
        return {**self._global, **self._clusters.models[cluster]}

    def _group(self, grid: Grid, request: RoundRequest) -> list[str]:
        """Clusters for all sites of the round, and a model for each cluster; returns the operator's notes."""
        notes: list[str] = []
        task, schedule = request.stamp.task, self.run.schedule
        starting = self._phase_task != task
        before = dict(self._grouping.labels)
        self._grouping.assign(grid, self.exchange, request, self.run, anew=starting, notes=notes)
        if starting and self._grouping.labels:
            self._begin_phase(task, schedule.list_classes(task), before)
        return sorted(notes)

    def _begin_phase(self, task: int, classes: range, before: Mapping[str, int]) -> None:
        """Start the shared layers from the global model, or else from the previous task's.

        The latter in a task without global rounds.
        """
        start = TaskStart(
            task, classes.stop, classes, self._shared(self._global), tuple(self._grouping.labels)
        )
        own = {name: self._global[name] for name in self._personal}
        carried = before if self._count_global_rounds(task) == 0 else None
        self._clusters.begin_phase(self.run, start, own, carried)
        self._phase_task = task

    def _complete(self, grid: Grid, request: RoundRequest, outcome: RoundOutcome) -> None:
        """After the last round of a task, or after each where every round is measured."""
        task, schedule = request.stamp.task, self.run.schedule
        last = self._round_in_task(request) == schedule.rounds[task - 1]
        if not self._clusters.models or not (last or self.run.experiment.evaluation.every == "round"):
            return
        experiment, releases = self.run.experiment, self.run.releases
        noise = count_noise(experiment)
        if noise is not None and releases is not None:
            charge = [charges.price_evaluation(experiment, request.stamp.run).entry]
            releases.asked(request.stamp.round, request.sites, charge)
        accuracies = complete_personal_models(
            grid,
            self.exchange,
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
        """From 1, after those of pre-training."""
        task = request.stamp.task
        lead = sum(self.run.experiment.lead_rounds(each) for each in range(1, task + 1))
        return request.stamp.round - lead - sum(self.run.schedule.rounds[: task - 1])

    def _count_global_rounds(self, task: int) -> int:
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
                for site, (x, y) in project_to_plane(vectors).items()
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
                "adjusted_rand": compute_adjusted_rand(labels, truth) if truth else None,
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
            **add_prefix("grouping", self._grouping.state_dict()),
            **super().state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._phase_task, self._personal = state["phase_task"], tuple(state["personal"])
        self._accuracy.by_site, self._accuracy.by_round = state["accuracy"], state["by_round"]
        self._grouping.load_state_dict(extract_prefixed("grouping", state))
        super().load_state_dict(state)
        if self.attached:
            self._clusters.load_state_dict(self.run, state)


class FedPer(ClusteredPersonalisation):
    """FedPer: shared layers are averaged over all sites by samples; personal ones are the sites' own.

    Arivazhagan et al. 2019 (arXiv 1912.00818).
    """

    asks = ASKS["fedper"]

    def __init__(self, personal: tuple[str, ...] = USUAL_PERSONAL) -> None:
        if not personal:
            raise ValueError("personal: found no layer, which is FedAvg; allowed: at least one")
        super().__init__(
            FedAvg(),
            0,
            clusters=1,
            grouping="random",
            personal=personal,
        )
