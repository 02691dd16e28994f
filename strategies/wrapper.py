"""The base of strategies around another one, to which they forward every hook that they do not change.

A subclass overrides the hooks in which it does something of its own, and calls super() for the rest. A
wrapper hands the whole round to its base, unless it takes back `train_round` of IncrementalStrategy and folds
the replies through the base.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from torch import Tensor

from perennial.protocol.measurements import asking
from perennial.protocol.messages import TrainRequest
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.ring.turns import TakesTurns
from perennial.strategies.round.disclosures import Disclosures
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.nested_state import nested, part
from perennial.strategies.round.outcome import RoundOutcome
from perennial.strategies.round.part import RoundPart
from perennial.strategies.round.request import Arrays, RoundRequest, TaskStart
from perennial.strategies.round.services import Services

if TYPE_CHECKING:
    from perennial.strategies.analytic import Analytic

INSIDE = "base"
"""Where a wrapper's state keeps the state of the strategy inside it."""


class Wrapper(IncrementalStrategy):
    """Base of strategies that work around another one.

    base: the strategy inside, which does all that this one does not change.
    """

    def __init__(self, base: IncrementalStrategy, max_update_norm: float | None = None) -> None:
        super().__init__(max_update_norm=max_update_norm or base.max_update_norm)
        self.base = base
        base.watchers = self.watchers
        self.staleness, self.serves_groups = base.staleness, base.serves_groups
        self.waits_for_busy_sites, self.takes_parts = base.waits_for_busy_sites, base.takes_parts
        self.combines_replies, self.stands_in = base.combines_replies, base.stands_in
        self.compares_updates = base.compares_updates
        self.needs = self.needs or base.needs

    # before anything starts

    def attach(self, services: Services) -> None:
        self._lend_bounds()
        self.base.attach(services)

    def begin_task(self, task: TaskStart) -> None:
        self.base.begin_task(task)

    def check_layers(self, arrays: Arrays) -> None:
        self.base.check_layers(arrays)

    def serve_group(self, whole: Any, own: Arrays, former: Any) -> None:
        self.base.members = self.members
        self.base.serve_group(whole.base, own, None if former is None else former.base)

    def disclosures(self) -> Disclosures:
        """The base's and its own."""
        base, own = self.base.disclosures(), super().disclosures()
        uploads = dict.fromkeys((*base.clear_uploads, *own.clear_uploads))
        return replace(base, clear_uploads=tuple(uploads))

    def largest_weight(self) -> float:
        self.base.asked = self.asked
        return self.base.largest_weight()

    # one round

    def train_round(self, grid: Grid, request: RoundRequest) -> RoundOutcome:
        """The base's round, with what the gate is told here."""
        self.base.max_update_norm, self.base.members = self.max_update_norm, self.members
        self._lend_bounds()
        outcome = self.base.train_round(grid, request)
        self.reference, self.outcome, self.asked = self.base.reference, outcome, self.base.asked
        return outcome

    def requests(self, request: TrainRequest, sites: Sequence[str]) -> dict[str, TrainRequest]:
        return self.base.requests(asking(request, self.measurements) if self.measurements else request, sites)

    def prepare_round(self, grid: Grid, request: RoundRequest, outcome: RoundOutcome) -> None:
        self.base.members = self.members
        self.base.prepare_round(grid, request, outcome)

    def begin_part(self, part: RoundPart) -> None:
        self.base.members = self.members
        super().begin_part(part)

    def begin_round(self) -> None:
        self.begin_round_of(self.base, self.reference, self.outcome)

    def while_waiting(self) -> None:
        self.base.while_waiting()

    def weight(self, reply: Admitted) -> float:
        return self.base.weight(reply)

    def fold(self, reply: Admitted) -> None:
        self.base.fold(reply)

    def close_round(self) -> int:
        return self.base.close_round()

    def finish_round(self) -> dict[str, Tensor]:
        return self.base.finish_round()

    def take_sum(self, total: Arrays, weight: float) -> dict[str, Tensor]:
        return self.base.take_sum(total, weight)

    @property
    def turns(self) -> TakesTurns | None:
        return self.base.turns

    @property
    def task_complete(self) -> bool:
        return self.base.task_complete

    @property
    def closed_form(self) -> "Analytic | None":
        return self.base.closed_form

    def _lend_bounds(self) -> None:
        """What the curriculum has set on this strategy, for a base that makes the round itself."""
        self.base.bounds, self.base.sums, self.base.running = self.bounds, self.sums, self.running

    # what stays

    def group_models(self) -> dict[str, Arrays]:
        return self.base.group_models()

    def summary_blocks(self) -> dict[str, Any]:
        return self.base.summary_blocks()

    def state_dict(self) -> dict[str, Any]:
        return nested(INSIDE, self.base.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base.load_state_dict(part(INSIDE, state))

    # Flower's own hooks

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.require_flowers_round()
        return self.base.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        result = self.base.aggregate_train(server_round, replies)
        self.outcome = self.base.outcome
        return result
