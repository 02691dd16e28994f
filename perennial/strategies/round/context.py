"""One round of one strategy: the model it starts from, the aggregator of its replies, and its outcome."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flwr.serverapp import Grid
from torch import Tensor

from perennial.models.sum_grid import SumGrid
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.outcome import RoundOutcome
from perennial.strategies.round.request import Arrays, RoundRequest


@dataclass
class RoundContext:
    """The context in which an aggregator works for one round.

    reference: the model that went out, or the strategy's part of it. outcome: filled as the round goes on.
    asked: sites asked in this round, whether or not they answer. max_update_norm: L2 norm above which an
    update is dropped. members: sites of the cluster that the strategy serves; None: all.
    by_curriculum: False under Flower's own start(), where the request's stamp and sites say nothing.
    """

    grid: Grid
    request: RoundRequest
    reference: Arrays
    outcome: RoundOutcome = field(default_factory=RoundOutcome)
    asked: int = 1
    max_update_norm: float | None = None
    members: frozenset[str] | None = None
    by_curriculum: bool = True

    @property
    def number(self) -> int:
        """Number of the round, from 1."""
        return self.request.stamp.round

    def sum_grid(self, largest_weight: float = 1.0) -> SumGrid:
        """The grid of this round's sums. largest_weight: the largest by which an update may be multiplied."""
        return self.request.sums.grid(self.request.most_replies, largest_weight)

    def part(self, reference: Arrays, sites: frozenset[str]) -> "RoundContext":
        """The context for `sites` alone, from the model `reference`: an own outcome, shared warnings."""
        asked: Mapping[str, int] = {s: node for s, node in self.request.sites.items() if s in sites}
        return replace(
            self,
            request=replace(self.request, sites=asked, known=self.request.most_replies),
            reference=reference,
            outcome=RoundOutcome(warnings=self.outcome.warnings),
            members=sites,
        )


class Aggregator:
    """Takes the replies of one round as they come, and keeps nothing of a reply's size.

    It begins at its construction, before the round's requests go out.
    """

    def __init__(self, ctx: RoundContext) -> None:
        self.ctx = ctx

    def while_waiting(self) -> None:
        """Do work that needs no reply, once the round's requests are out. Default: nothing."""

    def add(self, reply: Admitted) -> None:
        """Add one reply. Raises Rejected or OverflowError, with nothing added, if it cannot count."""
        raise NotImplementedError

    def add_stack(self, replies: Sequence[Admitted], rows: Tensor) -> bool:
        """Add at once the replies of K sites that trained in one pass; rows: their updates, (K, P).

        Returns False, with nothing added, if they must be added one by one, which is the default.
        """
        return False

    def complete(self) -> int:
        """End the round's replies; returns how many count, with those made in place of missing ones."""
        return len(self.ctx.outcome.participants)

    def result(self) -> dict[str, Tensor]:
        """The new global model. Called only with a quorum of replies."""
        raise NotImplementedError


class Around(Aggregator):
    """An aggregator that passes everything to another one; subclasses change parts of it."""

    def __init__(self, ctx: RoundContext, base: Aggregator) -> None:
        super().__init__(ctx)
        self.base = base

    def while_waiting(self) -> None:
        self.base.while_waiting()

    def add(self, reply: Admitted) -> None:
        self.base.add(reply)

    def complete(self) -> int:
        return self.base.complete()

    def result(self) -> dict[str, Tensor]:
        return self.base.result()
