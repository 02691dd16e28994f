"""What the sites told of a model at the end of a task: counts of each, and tables of all together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.serverapp import Grid

from perennial.foundation.errors import ProtocolError
from perennial.learning.evaluation_tables import MOST_CLASSES, EvaluationTables
from perennial.protocol.messages import EvaluateReply, EvaluateRequest
from perennial.server.evaluation import ToldCounts, told_counts
from perennial.server.history import ALL_SITES
from perennial.server.masked_task_end import opened_evaluation
from perennial.strategies.round.exchange import Exchange
from perennial.strategies.round.queries import answers, check_counts
from perennial.strategies.secure.masked_sums import MaskedSums

LARGEST = 2**62
Note = Callable[[str, str], None]
Requests = Sequence[tuple[str, int, EvaluateRequest]]


@dataclass
class SiteEvaluation:
    """counts: by site, or of all together as ALL_SITES. tables: the sum over the sites that sent theirs.

    by_site: (M, 3) samples, right answers and samples called so, of each site that sent tables in the clear.
    told: how many sites sent tables. suppressed: sites that keep some counts to themselves.
    """

    counts: dict[str, ToldCounts] = field(default_factory=dict)
    tables: EvaluationTables | None = None
    by_site: dict[str, np.ndarray] = field(default_factory=dict)
    told: int = 0
    suppressed: int = 0

    @property
    def held_out(self) -> int:
        """Samples that sites counted, with tables or without."""
        return sum(samples or 0 for _, total in self.counts.values() for samples in total)

    def add(self, site: str, reply: EvaluateReply, subgroups: int) -> None:
        """Count in one reply."""
        self.counts[site] = told_counts(reply.correct, reply.total, reply.withheld)
        self.suppressed += bool(reply.withheld or reply.uncalibrated)
        if reply.tables is None:
            return
        tables = tables_of(reply, subgroups)
        self.tables = tables if self.tables is None else self.tables + tables
        self.by_site[site] = tables.by_class()
        self.told += 1


def evaluate_at_sites(
    grid: Grid,
    exchange: Exchange,
    requests: Requests,
    sums: MaskedSums | None,
    deadline: float,
    note: Note,
    subgroups: int = 0,
) -> SiteEvaluation:
    """Ask the sites, and add up their tables as they come, so that memory does not grow with their number.

    sums: of the run, where the answers are parts of a masked sum.
    """
    found = SiteEvaluation()
    if not requests:
        return found
    if sums is not None:
        return _of_all_together(grid, requests, sums, deadline, note, subgroups)

    def check(reply: EvaluateReply) -> None:
        check_counts(reply)
        if reply.tables is not None:
            check_tables(reply, subgroups)

    for site, reply in answers(grid, exchange, requests, EvaluateReply, deadline, note, check):
        found.add(site, reply, subgroups)
    order = [site for site, _, _ in requests]
    found.counts = {site: found.counts[site] for site in order if site in found.counts}
    found.by_site = {site: found.by_site[site] for site in order if site in found.by_site}
    for site, (_, total) in found.counts.items():
        if hidden := sum(samples is None for samples in total):
            note(site, f"withholds the counts of {hidden} classes (its floor)")
    return found


def _of_all_together(
    grid: Grid, requests: Requests, sums: MaskedSums, deadline: float, note: Note, subgroups: int
) -> SiteEvaluation:
    opened = opened_evaluation(sums, grid, requests, deadline, note)
    if opened is None:
        return SiteEvaluation()
    correct, total, beside = opened
    found = SiteEvaluation({ALL_SITES: told_counts(correct, total, None)})
    if beside:
        *counts, found.told, found.suppressed = beside
        try:
            tables = EvaluationTables.from_vector(np.array(counts), len(total), subgroups)
        except ValueError as error:
            note("evaluation", str(error))
        else:
            found.tables = tables if found.told else None
    return found


def tables_of(reply: EvaluateReply, subgroups: int) -> EvaluationTables:
    """The tables in a reply. Raises ProtocolError when they are none of this task."""
    assert reply.tables is not None
    counts = reply.tables.get("counts")
    if set(reply.tables) != {"counts"} or counts is None or counts.ndim != 1 or counts.is_floating_point():
        raise ProtocolError("EvaluateReply: tables: allowed `counts`, one list of whole numbers")
    try:
        return EvaluationTables.from_vector(counts.cpu().numpy(), reply.num_classes, subgroups)
    except ValueError as error:
        raise ProtocolError(f"EvaluateReply: {error}") from error


def check_tables(reply: EvaluateReply, subgroups: int) -> None:
    """Raises ProtocolError when a site's tables cannot be true, or do not fit its counts."""
    if reply.num_classes > MOST_CLASSES:
        raise ProtocolError(f"EvaluateReply: tables: allowed up to {MOST_CLASSES} classes")
    tables = tables_of(reply, subgroups)
    counts = tables.vector()
    if counts.min(initial=0) < 0 or counts.max(initial=0) > LARGEST:
        raise ProtocolError("EvaluateReply: tables: a count is below 0 or beyond what can be")
    total, samples = np.array(reply.total), sum(reply.total)
    fits = (
        np.array_equal(tables.confusion.sum(axis=1), total)
        and tables.correct == reply.correct
        and np.array_equal(tables.positive.sum(axis=1), total)
        and np.array_equal(tables.negative.sum(axis=1), samples - total)
        and (tables.confidence[:, 0].sum(axis=1) == samples).all()
        and (tables.confidence[:, 1] <= tables.confidence[:, 0]).all()
    )
    if not fits:
        raise ProtocolError("EvaluateReply: tables: they do not add up to the counts beside them")
