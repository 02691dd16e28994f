"""What single records of a site have paid, for the eyes of the hospital alone.

The dearest record depends on which records there are, so nothing here ever leaves the site.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perennial.foundation.record_key import BOOK, FOLDER, record_key
from perennial.privacy.composition import Cost, compose
from perennial.privacy.config import Unit
from perennial.privacy.ledger import Ledger, Limit
from perennial.privacy.record_book import RecordBook


@dataclass(frozen=True)
class RecordFigures:
    """Privacy costs of the records that any release was computed from.

    records: how many they are. dearest, median: cost of such records. spent: records that another release
    like the newest would leave out; None without a limit.
    """

    records: int
    dearest: Cost
    median: Cost
    spent: int | None

    def __str__(self) -> str:
        left = "" if self.spent is None else f"; {self.spent} have spent their budget"
        return (
            f"{self.records} records were in releases{left}; epsilon of the dearest "
            f"{self.dearest.epsilon:.4g}, of the median {self.median.epsilon:.4g}"
        )


def record_figures(
    state_dir: Path, delta: float, limit: Limit | None = None, unit: Unit | None = None
) -> RecordFigures | None:
    """Privacy costs of a site's records; None if no release has named its records yet.

    Raises StateError when the ledger or the record book is damaged.
    """
    ledger = Ledger(state_dir)
    if not (state_dir / FOLDER / BOOK).exists() or not ledger.started:
        return None
    book = RecordBook(state_dir, record_key(state_dir))
    payments, ids = book.payments(ledger), book.every_line()
    newest = [entry for entry in ledger.entries() if entry.records]
    if not len(ids) or not newest:
        return None
    measured = limit or Limit(1.0, delta, unit)
    paid, _ = payments.of(ids, measured, newest[-1])
    order = np.lexsort(paid.T[::-1])
    dearest, median = (
        compose(payments.counts(ids[place : place + 1]), delta, "prv", unit)
        for place in (order[-1], order[len(order) // 2])
    )
    spent = None if limit is None else int((~payments.affordable(ids, limit, newest[-1])).sum())
    return RecordFigures(len(ids), dearest, median, spent)
