"""Tables of counts that sites sent: checked, and added up as they come."""

from dataclasses import dataclass, field, fields

import numpy as np

from perennial.foundation.errors import ProtocolError
from perennial.learning.evaluation_tables import MOST_CLASSES, EvaluationTables
from perennial.protocol.messages import EvaluateReply

LARGEST = 2**62


@dataclass
class SiteTables:
    """Tables of sites, added up. total: over the `reported` sites that sent tables; None without any.

    by_site: (M, 3) samples, right answers and predictions, of each site that sent tables in the clear.
    suppressed: number of sites that withhold some counts.
    """

    total: EvaluationTables | None = None
    by_site: dict[str, np.ndarray] = field(default_factory=dict)
    reported: int = 0
    suppressed: int = 0

    def add(self, site: str, reply: EvaluateReply, subgroups: int) -> None:
        """Add one reply's tables, so that memory does not grow with the number of sites."""
        self.suppressed += bool(reply.withheld or reply.uncalibrated)
        if reply.tables is None:
            return
        tables = tables_of(reply, subgroups)
        self.total = tables if self.total is None else self.total + tables
        self.by_site[site] = tables.by_class()
        self.reported += 1

    @classmethod
    def of_a_sum(cls, beside: list[int], classes: int, subgroups: int) -> "SiteTables":
        """Read tables from the further counts of a masked sum. Raises ValueError if their number is wrong."""
        if not beside:
            return cls()
        *counts, reported, suppressed = beside
        tables = EvaluationTables.from_vector(np.array(counts, dtype=np.int64), classes, subgroups)
        return cls(tables if reported else None, {}, reported, suppressed)


def counts_beside(classes: int, subgroups: int) -> int:
    """Number of further counts, beside right answers and samples, in a masked sum with tables."""
    return len(EvaluationTables.empty(classes, subgroups).vector()) + 2


def tables_of(reply: EvaluateReply, subgroups: int) -> EvaluationTables:
    """Read the tables in a reply. Raises ProtocolError if they have another form or size."""
    assert reply.tables is not None
    counts = reply.tables.get("counts")
    if set(reply.tables) != {"counts"} or counts is None or counts.ndim != 1 or counts.is_floating_point():
        raise ProtocolError("EvaluateReply: tables: allowed `counts`, one list of whole numbers")
    try:
        return EvaluationTables.from_vector(counts.cpu().numpy(), reply.num_classes, subgroups)
    except ValueError as error:
        raise ProtocolError(f"EvaluateReply: {error}") from error


def check_tables(reply: EvaluateReply, subgroups: int, *, asked: bool, validation: bool = False) -> None:
    """Raise ProtocolError if a site's tables cannot be true, do not fit its counts, or were not asked for.

    validation: whether they must hold likelihoods alone, from which the temperature is chosen.
    """
    if reply.tables is None:
        return
    if not asked or reply.num_classes > MOST_CLASSES:
        raise ProtocolError(f"EvaluateReply: tables: not asked for; allowed up to {MOST_CLASSES} classes")
    tables = tables_of(reply, subgroups)
    counts = tables.vector()
    if counts.min(initial=0) < 0 or counts.max(initial=0) > LARGEST:
        raise ProtocolError("EvaluateReply: tables: a count is below 0 or beyond what can be")
    fitted = {"likelihood", "validation"}
    if validation:
        others = [f.name for f in fields(tables) if f.name not in fitted and getattr(tables, f.name).any()]
        if others:
            raise ProtocolError(f"EvaluateReply: tables: {others[0]}: not asked for with validation samples")
        return
    if tables.likelihood.any():
        raise ProtocolError("EvaluateReply: tables: likelihood: not asked for with test samples")
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
