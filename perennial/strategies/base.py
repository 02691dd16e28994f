"""What every strategy of Perennial shares: facts about it, the hooks of a run, its durable state.

A method is a subclass that says what takes the replies of a round (`aggregator`), or how a round goes
(`train_round`). It works under Flower's own `start()` with any ClientApp that follows Flower's convention,
and under the curriculum, which calls `attach`, `begin_task`, `train_round`, `state_dict` and
`load_state_dict`. A strategy with others inside it passes these on to them.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Self, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from perennial.config.strategies import Asks
from perennial.foundation.errors import ConfigError, PrivacyError
from perennial.protocol.measurements import add_measurements
from perennial.protocol.messages import TrainRequest
from perennial.strategies.round.context import Aggregator, RoundContext, RoundOutcome, RunContext
from perennial.strategies.round.exchange import Exchange
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.parallel import FlowerRounds, run_parallel_round
from perennial.strategies.round.request import (
    Arrays,
    Disclosures,
    RoundRequest,
    TaskStart,
    Traits,
    add_prefix,
    extract_prefixed,
)

Kind = TypeVar("Kind", bound="IncrementalStrategy")


class IncrementalStrategy(FlowerRounds):
    """Base of all strategies; flower: keywords of Flower's FedAvg, for use under start()."""

    traits = Traits()
    asks = Asks()
    """All that its requests may ask of a site beside an update."""
    inner: "tuple[IncrementalStrategy, ...]" = ()
    """The strategies that this one works around; they see every hook of the run, state apart."""

    def __init__(self, **flower: Any) -> None:
        super().__init__(**flower)
        self.exchange = Exchange()
        self._run: RunContext | None = None

    def find(self, kind: type[Kind]) -> Kind | None:
        """The outermost strategy of this kind: this one, or one inside it; None if there is none."""
        found = (each.find(kind) for each in self.inner)
        return self if isinstance(self, kind) else next((each for each in found if each is not None), None)

    # the life of a run

    def attach(self, run: RunContext) -> None:
        """Begin a run, once, before the first task or a resume."""
        self._run = run
        for each in self.inner:
            each.attach(run)

    @property
    def attached(self) -> bool:
        """Whether the strategy works in a run of Perennial, and not under Flower's own start()."""
        return self._run is not None

    @property
    def run(self) -> RunContext:
        """The run that the strategy works in. Raises ConfigError if it works in none."""
        if self._run is None:
            name = type(self).__name__
            raise ConfigError(f"strategy {name}: works in a run of Perennial alone; use `perennial run`")
        return self._run

    def check_layers(self, arrays: Arrays) -> None:
        """Raise ConfigError if the method cannot work on a model of these tensors. Default: it can."""
        for each in self.inner:
            each.check_layers(arrays)

    def begin_task(self, task: TaskStart) -> None:
        """Prepare for a task; state that has the model's shape grows here."""
        for each in self.inner:
            each.begin_task(task)

    def serve_group(self, whole: Self, own: Arrays, former: Self | None) -> None:
        """Become the strategy of one group of the sites that `whole`, of the same class and settings, serves.

        own: the global model's layers that stay at the sites; rounds lack them. former: their strategy in the
        task before, if the group goes on. Called after attach, before begin_task or a resume.
        """
        for place, each in enumerate(self.inner):
            each.serve_group(whole.inner[place], own, former.inner[place] if former is not None else None)

    # one round

    def requests(self, request: TrainRequest, sites: Sequence[str]) -> dict[str, TrainRequest]:
        """Derive each site's request from the plain one; by default the same for all, with measurements.

        Sites that get the same request share one object, so that a model is serialised once.
        """
        return dict.fromkeys(sites, self.add_measurements(request))

    def add_measurements(self, request: TrainRequest) -> TrainRequest:
        """The request, with this strategy's measurements added to what sites report."""
        return add_measurements(request, self.measurements) if self.measurements else request

    @property
    def measurements(self) -> Sequence[str]:
        """What sites are asked to report beside their updates; default: all that the method may ask for."""
        return self.asks.measurements

    def prepare_round(self, ctx: RoundContext) -> None:
        """Do the exchanges with sites that must be over before the round's requests go out."""
        for each in self.inner:
            each.prepare_round(ctx)

    def train_round(self, grid: Grid, request: RoundRequest) -> RoundOutcome:
        """Train and aggregate one round; default: one exchange with all sites."""
        return run_parallel_round(self, self.build_context(grid, request))

    def build_context(self, grid: Grid, request: RoundRequest) -> RoundContext:
        """The context of a round of this strategy, before any site is asked."""
        return RoundContext(grid, request, request.arrays, max_update_norm=request.max_update_norm)

    def weight(self, reply: Admitted) -> float:
        """The weight of one update relative to others; default: its number of samples."""
        return float(reply.num_examples)

    def largest_weight(self, asked: int) -> float:
        """The largest factor by which one site's update can enter the new model of a round of `asked` sites.

        It holds whatever the sites report and whoever answers, with every other site's weight unchanged by
        that site: weights fixed in public, over a public divisor. Noise at the server is sized by it. Raises
        PrivacyError if the method has no such bound, which is the default.
        """
        raise PrivacyError(
            f"strategy: {type(self).__name__} does not bound the weight of one site, so noise at the server "
            "cannot be sized for it; privacy.mode client_central goes with fedavg"
        )

    # what is said of it, and what stays

    def disclosures(self) -> Disclosures:
        """What replies carry in the clear; default: all that this method and those inside it may ask for."""
        own = Disclosures(clear_uploads=self.asks.clear_uploads)
        own |= Disclosures(clear_uploads=self.asks.measurements)
        for each in self.inner:
            own |= each.disclosures()
        return own

    def group_models(self) -> dict[str, Arrays]:
        """group -> the model that the server keeps for this group of sites beside the global one."""
        return {group: model for each in self.inner for group, model in each.group_models().items()}

    def summary_blocks(self) -> dict[str, Any]:
        """Blocks of summary.json that this method fills, by name; see server/report/method_blocks.py."""
        return {name: block for each in self.inner for name, block in each.summary_blocks().items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed server needs: tensors and JSON-able values by name."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what state_dict() returned."""


INSIDE = "base"
"""Where a wrapper's state keeps the state of the strategy inside it."""


class Wrapper(IncrementalStrategy):
    """Base of strategies that work around another one.

    base: the strategy inside, which does all that this one does not change.
    traits: the base's, and what both require; a subclass may replace some of them.
    """

    def __init__(self, base: IncrementalStrategy) -> None:
        super().__init__()
        self.base, self.inner = base, (base,)
        self.traits = self.adapted(base.traits)

    def adapted(self, base: Traits) -> Traits:
        """The traits of this strategy around a base with these traits; default: the base's."""
        return base

    def train_round(self, grid: Grid, request: RoundRequest) -> RoundOutcome:
        """Run one exchange around the base's aggregator, or the base's own kind of round."""
        if self.base.traits.aggregates_in_parallel:
            return super().train_round(grid, request)
        return self.base.train_round(grid, request)

    def requests(self, request: TrainRequest, sites: Sequence[str]) -> dict[str, TrainRequest]:
        """The base's requests, with what this strategy measures added."""
        return self.base.requests(self.add_measurements(request), sites)

    def aggregator(self, ctx: RoundContext) -> Aggregator:
        return self.base.aggregator(ctx)

    def weight(self, reply: Admitted) -> float:
        return self.base.weight(reply)

    def state_dict(self) -> dict[str, Any]:
        return add_prefix(INSIDE, self.base.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base.load_state_dict(extract_prefixed(INSIDE, state))

    # Flower's own rounds of a base whose sites train in turn

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if not self.base.traits.aggregates_in_parallel and not self.traits.requires:
            return self.base.configure_train(server_round, arrays, config, grid)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        if not self.base.traits.aggregates_in_parallel:
            return self.base.aggregate_train(server_round, replies)
        return super().aggregate_train(server_round, replies)
