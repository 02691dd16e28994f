"""Asks sites for their sums, in one exchange for each task, and for the counts and choices around it."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeVar

import torch
from flwr.serverapp import Grid
from torch import Tensor

from perennial.config.secure_words import decode_integers, hash_statistics_subject
from perennial.foundation.errors import DataError, ProtocolError
from perennial.learning.analytic.solve import LinearHead
from perennial.learning.analytic.statistics import Statistics, SumsForm
from perennial.privacy.noised_sums import SumsNoise
from perennial.privacy.secure.server_session import NotEnough
from perennial.privacy.signed_sums import Signer, Statement, hash_lists
from perennial.protocol.messages import (
    ClassCountsReply,
    ClassCountsRequest,
    CompareHeadsReply,
    CompareHeadsRequest,
    StatisticsReply,
    StatisticsRequest,
)
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import Tensors, hash_tensors
from perennial.strategies.analytic.checks import check_exact, check_noised, read_statistics
from perennial.strategies.round.context import RoundOutcome
from perennial.strategies.round.exchange import Exchange, ask, yield_answers
from perennial.strategies.round.request import RoundRequest
from perennial.strategies.secure.masked_sums import MaskedSums
from perennial.strategies.secure.store import Opened

Reply = TypeVar("Reply", bound=Stamp)


@dataclass(frozen=True)
class StatisticsRound:
    """The questions of one round. A site that failed to answer one is asked no other in this round.

    features: SHA-256 of the maps. form: of the sums that sites send.
    """

    grid: Grid
    exchange: Exchange
    request: RoundRequest
    outcome: RoundOutcome
    features: str
    form: SumsForm
    noise: SumsNoise | None = None
    """On each site's sums, where there is any."""
    masked: MaskedSums | None = None
    """Through which everything is asked under `secure`."""
    signers: tuple[Signer, ...] | None = None
    """Whose keys sign sums, in the order in which they came; None: no statements are asked for."""
    statements: dict[tuple[int, str], Statement] = field(default_factory=dict)
    """(task, site) -> what it signed of its sums, of those that came in this round."""
    failed: set[str] = field(default_factory=set)

    def ask_statistics(
        self, sites: Sequence[str], task: int, classes: range, weights: list[int] | None = None
    ) -> Iterator[tuple[str, Statistics]]:
        """Ask sites for their sums of one task's classes, and yield (site, sums) as they come.

        weights: of the classes, for class-balanced sums; None: plain ones.
        """
        message = self._request(task, weights)
        read: list[Statistics] = []

        def check(reply: StatisticsReply) -> None:
            read.append(self._read(reply, task, classes, weights))

        found = self._asked(sites)
        requests = [(site, node, message) for site, node in found.items()]
        replies = yield_answers(
            self.grid, self.exchange, requests, StatisticsReply, self.request.deadline, self.drop_site, check
        )
        for site, reply in replies:
            # yield_answers() checks a reply and yields it before it takes the next one
            found = read.pop()
            if weights is not None or self._verify_signature(site, reply, found):
                yield site, found

    def __post_init__(self) -> None:
        if self.masked is not None:
            self.masked.exchange = self.exchange

    def of_sites(
        self, sites: Sequence[str], task: int, classes: range
    ) -> Iterator[tuple[Sequence[str], Statistics]]:
        """Ask for sums of one task's classes; yields (sites, their total): one site, or a masked cohort.

        When a cohort's sum is not opened, the round's warnings say why.
        """
        if self.masked is None:
            yield from (([site], found) for site, found in self.ask_statistics(sites, task, classes))
            return
        try:
            yield from ((opened.survivors, found) for opened, found in self.ask_cohorts(sites, task, classes))
        except (NotEnough, ValueError) as reason:
            self.outcome.warnings.append(f"task {task}: {reason}")

    def order_tasks(self, tasks: Iterable[int]) -> list[int]:
        """The tasks, first the one whose masked sum awaits its opening; it cannot be made anew."""
        pending = None if self.masked is None else self.masked.store.pending
        if pending is None:
            return list(tasks)
        return sorted(tasks, key=lambda task: self.hash_subject(task) != pending.model)

    def hash_subject(self, task: int) -> str:
        """The hash by which a masked sum of the task is known."""
        return hash_statistics_subject(self.features, self.request.stamp.class_order, task, None)

    def ask_cohorts(
        self, sites: Sequence[str], task: int, classes: range
    ) -> Iterator[tuple[Opened, Statistics]]:
        """Yield masked sums of one task's classes, each over a cohort of sites; no site is in two.

        Those that were opened before come first, then one over the sites that are in none of these.
        Raises NotEnough when that one is not opened, and ValueError when it is of no use.
        """
        assert self.masked is not None
        about = self.hash_subject(task)
        left = dict.fromkeys(sites)
        for opened in self.masked.store.list_opened("statistics", about):
            if left.keys() & set(opened.survivors):
                left = {site: None for site in left if site not in opened.survivors}
                yield opened, self._of_cohort(opened, classes)
        here = self._asked(list(left))
        needed = self.masked.parameters.count_survivors_needed(len(here))
        if len(here) < needed:
            if here:
                raise NotEnough(f"{', '.join(here)} wait for others: a sum takes {needed} sites")
            return
        message = StatisticsRequest(**self._stamp, of_task=task, features=self.features)
        requests = [(site, node, message) for site, node in here.items()]
        length = sum(map(math.prod, self.form.list_shapes(len(classes)).values()))
        yield self.masked.collect(
            self.grid,
            "statistics",
            about,
            requests,
            self.request.deadline,
            self.drop_site,
            length,
            lambda opened: self._of_cohort(opened, classes),
        )

    def _of_cohort(self, opened: Opened, classes: range) -> Statistics:
        """Raises ValueError for a sum that no samples have."""
        try:
            shapes = self.form.list_shapes(len(classes))
            gram, sums, counts = decode_integers(opened.words, *shapes.values())
            found = Statistics(gram, sums, counts, classes)
            if self.noise is not None:
                many = len(opened.survivors)
                check_noised(found, self.noise.of_many(many), many)
            else:
                check_exact(found, sites=len(opened.survivors))
        except (ProtocolError, ValueError) as error:
            raise ValueError(f"the opened sum is not used: {error}") from error
        return found

    def _request(self, task: int, weights: list[int] | None) -> StatisticsRequest:
        rows = None if weights is not None or self.signers is None else [key.row for key in self.signers]
        return StatisticsRequest(
            **self._stamp, of_task=task, features=self.features, weights=weights, signers=rows
        )

    def _verify_signature(self, site: str, reply: StatisticsReply, found: Statistics) -> bool:
        """Whether a site signed these sums for this run, where it is asked to; else it is dropped by name."""
        if self.signers is None:
            return True
        try:
            statement = Statement.from_json(json.loads(reply.statement or "null"))
            stamp, listed = self.request.stamp, hash_lists(key.row for key in self.signers)
            expected = (site, stamp.run, stamp.experiment, stamp.class_order, reply.of_task, self.features)
            told = attrgetter("site", "run", "experiment", "class_order", "task", "features")(statement)
            if told != expected or statement.signers not in listed:
                raise ValueError("of another run, task or list of signers")
            if f"{site} {statement.key}" not in {key.row for key in self.signers} or not statement.signed:
                raise ValueError("its signature is not the site's")
            if not statement.is_of(found.sha256):
                raise ValueError("of other sums")
        except (ValueError, RecursionError) as error:
            self.drop_site(site, f"StatisticsReply: statement: {error}")
            return False
        self.statements[reply.of_task, site] = statement
        return True

    def _read(
        self, reply: StatisticsReply, task: int, classes: range, weights: list[int] | None
    ) -> Statistics:
        """Return a reply's sums. Raises ProtocolError if no samples can have them."""
        if (reply.of_task, reply.features) != (task, self.features):
            raise ProtocolError("StatisticsReply: of_task, features: not those that were asked for")
        found = read_statistics(reply.statistics, self.form, classes)
        if self.noise is not None:
            check_noised(found, self.noise)
        else:
            check_exact(found, weights)
        return found

    def ask_class_counts(self, sites: Sequence[str], task: int, classes: range) -> dict[str, list[int]]:
        """Ask sites for counts: site -> its training samples of each of the task's classes."""
        message = ClassCountsRequest(**self._stamp, of_task=task)

        def check(reply: ClassCountsReply) -> None:
            if reply.of_task != task or len(reply.counts) != len(classes):
                raise ProtocolError(f"ClassCountsReply: expected counts of the {len(classes)} classes")

        found = self._ask(ClassCountsReply, message, self._asked(sites), check)
        return {site: reply.counts for site, reply in found.items()}

    def ask_right_answers(self, heads: Sequence[LinearHead]) -> tuple[Tensor, Tensor]:
        """Ask all sites how heads answer their validation samples: (right answers (K, C), samples (C,)).

        Raises DataError if no site answers, or no masked sum was opened.
        """
        known = self.request.stamp.num_classes
        if self.masked is not None:
            return self._collect_masked_answers(self._build_comparison(heads), len(heads))
        correct = torch.zeros(len(heads), known, dtype=torch.int64)
        total = torch.zeros(known, dtype=torch.int64)
        # one object for all sites, so that it is serialised once
        message = self._build_comparison(heads)

        def check(reply: CompareHeadsReply) -> None:
            if len(reply.total) != known or len(reply.correct) != known * len(heads):
                raise ProtocolError(f"CompareHeadsReply: expected {len(heads)} times {known} counts")
            if any(right > reply.total[place % known] for place, right in enumerate(reply.correct)):
                raise ProtocolError("CompareHeadsReply: more right answers than samples")

        found = self._ask(CompareHeadsReply, message, self._asked(list(self.request.sites)), check)
        if not found:
            raise DataError("no site answered how heads do on its validation samples")
        for reply in found.values():
            correct += torch.tensor(reply.correct).view(len(heads), known)
            total += torch.tensor(reply.total)
        return correct, total

    def _build_comparison(self, heads: Sequence[LinearHead]) -> CompareHeadsRequest:
        tensors = [head.list_tensors() for head in heads]
        return CompareHeadsRequest(
            **self._stamp,
            features=self.features,
            heads=Tensors(
                weight=torch.stack([tensor["head.weight"] for tensor in tensors]),
                bias=torch.stack([tensor["head.bias"] for tensor in tensors]),
            ),
        )

    def _collect_masked_answers(self, message: CompareHeadsRequest, heads: int) -> tuple[Tensor, Tensor]:
        assert self.masked is not None
        known = message.num_classes
        sites = self._asked(list(self.request.sites))
        requests = [(site, node, message) for site, node in sites.items()]
        about, deadline = hash_tensors(message.heads), self.request.deadline

        def read(opened: Opened) -> tuple[Tensor, Tensor]:
            correct, total = decode_integers(opened.words, (heads, known), (known,))
            if bool((correct > total).any()) or bool((correct < 0).any()):
                raise ValueError("more right answers than samples, or fewer than none")
            return correct, total

        length, drop = (heads + 1) * known, self.drop_site
        try:
            return self.masked.collect(
                self.grid, "compare_heads", about, requests, deadline, drop, length, read
            )[1]
        except (NotEnough, ValueError) as missing:
            raise DataError(f"strategy.shrinkage: no sum of right answers: {missing}") from missing

    @property
    def _stamp(self) -> dict[str, Any]:
        return self.request.stamp.stamp_fields

    def _asked(self, sites: Sequence[str]) -> dict[str, int]:
        nodes: Mapping[str, int] = self.request.sites
        return {
            site: nodes[site] for site in sites if site not in self.failed and not self.exchange.is_busy(site)
        }

    def _ask(
        self, expected: type[Reply], message: Stamp, sites: Mapping[str, int], check: Callable[[Reply], None]
    ) -> dict[str, Reply]:
        requests = [(site, node, message) for site, node in sites.items()]
        return ask(self.grid, self.exchange, requests, expected, self.request.deadline, self.drop_site, check)

    def drop_site(self, site: str, reason: str) -> None:
        """Leave a site out of the rest of the round, for this reason."""
        self.failed.add(site)
        self.outcome.dropped.append((site, reason))
