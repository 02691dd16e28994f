"""One round of one strategy: the model it starts from, the aggregator of its replies, and its outcome."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from flwr.serverapp import Grid
from torch import Tensor

from perennial.config.experiment import Experiment
from perennial.data.schedule import TaskSchedule
from perennial.learning.scored import Scores
from perennial.models.incremental import IncrementalModel
from perennial.models.sum_grid import SumGrid
from perennial.privacy.entries import Entry
from perennial.protocol.tensors import count_bytes
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.request import Arrays, RoundRequest

if TYPE_CHECKING:
    from perennial.privacy.signed_sums import Signer
    from perennial.strategies.secure.masked_sums import MaskedSums


@dataclass
class RoundOutcome:
    """The outcome of a round. arrays: the new global model, or None when the round was skipped."""

    arrays: dict[str, Tensor] | None = None
    participants: dict[str, Admitted] = field(default_factory=dict)
    dropped: list[tuple[str, str]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    asked: int = 0
    """Sites asked, whether or not they answer."""
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)
    """The method's own facts about this round, JSON-able; written to the journal with the round."""
    warnings: list[str] = field(default_factory=list)
    """Sentences for the operator."""

    def take(self, reply: Admitted) -> None:
        """Note a reply that is in the model, without its update: memory must not grow with the sites."""
        self.warnings += [f"site {reply.site}: {note}" for note in reply.notes]
        self.bytes_up += count_bytes(reply.update)
        self.participants[reply.site] = replace(reply, update={})

    def list_silent_sites(self, sites: Iterable[str]) -> list[str]:
        """Those of these sites from which nothing came, not even a refusal."""
        failed = (site for site, _ in (*self.dropped, *self.refused))
        heard = {*self.participants, *failed}
        return [site for site in sites if site not in heard]

    @property
    def skipped(self) -> bool:
        return self.arrays is None

    @property
    def train_loss(self) -> float | None:
        """Mean of the sites' losses, weighted by samples; None when no site reported one."""
        reported = [
            (r.train_loss, r.num_examples)
            for _, r in sorted(self.participants.items())
            if r.train_loss is not None
        ]
        return sum(loss * n for loss, n in reported) / sum(n for _, n in reported) if reported else None


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
        return SumGrid(max(1, self.request.most_replies), largest_weight)

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


Counts = tuple[list[int], list[int]]
"""(right answers, samples) of each class."""


Judge = Callable[[Mapping[str, Tensor], int], Scores]
"""(model, samples at most) -> its answers to the server's own samples."""


class ReleaseRecord(Protocol):
    """Records a protected release before a strategy asks sites for it; see server/releases.py."""

    def asked(self, number: int, sites: Iterable[str], entries: Sequence[Entry], once: str = "") -> None: ...

    def refused(
        self, number: int, sites: Iterable[str], entries: Sequence[Entry], once: str = ""
    ) -> None: ...


@dataclass(frozen=True)
class RunContext:
    """The run that a strategy works in: its experiment, and what the server lends.

    schedule: tasks and their classes. input_shape: of one sample. device: on which the server computes.
    constants: (mean, std) of inputs, if the server knows them.
    load: the server's model with given travelling arrays in it, in evaluation mode; one model serves all
    calls, so a strategy that trains takes a copy.
    measure: counts of given arrays on the server's held-out samples of the classes seen so far; None if
    the server has none.
    judge: the answers of given arrays to at most so many of these samples, the same ones in every call of a
    task; None if the server has none.
    folder: where a strategy may keep a file of its own that a resumed run finds again.
    releases: the server's record of what sites are asked to release; None if nothing is protected.
    secret: of the run, which no site knows; None in simulation, where it is the experiment's seed and every
    site could know it.
    sums: masked sums over the sites, under `secure` alone.
    signers: the signing keys of the sites that sign what they send, as they come.
    """

    experiment: Experiment
    schedule: TaskSchedule
    input_shape: tuple[int, ...]
    device: torch.device
    constants: tuple[Tensor, Tensor] | None
    load: Callable[[Mapping[str, Tensor]], IncrementalModel]
    measure: Callable[[Mapping[str, Tensor]], Counts] | None
    judge: Judge | None = None
    folder: Path | None = None
    releases: ReleaseRecord | None = None
    secret: int | None = None
    sums: "MaskedSums | None" = None
    signers: "Mapping[str, Signer]" = field(default_factory=dict)

    @property
    def secret_seed(self) -> int:
        """The seed of streams that a site must not foresee: orders, relabelling, buckets, valued sweeps."""
        return self.experiment.seed if self.secret is None else self.secret
