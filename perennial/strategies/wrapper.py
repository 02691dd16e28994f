"""The base of strategies around another one, which change requests, the aggregator or the whole round."""

from collections.abc import Iterable, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from perennial.protocol.messages import TrainRequest
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.round.context import Aggregator, RoundContext, RoundOutcome
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.request import RoundRequest, Traits, nested, part

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
        return self.base.requests(self.measured(request), sites)

    def aggregator(self, ctx: RoundContext) -> Aggregator:
        return self.base.aggregator(ctx)

    def weight(self, reply: Admitted) -> float:
        return self.base.weight(reply)

    def state_dict(self) -> dict[str, Any]:
        return nested(INSIDE, self.base.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base.load_state_dict(part(INSIDE, state))

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
