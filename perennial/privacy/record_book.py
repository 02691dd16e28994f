"""From which records a site's releases were computed, so that each record pays for those that it was in.

Beside the ledger lie the sets of records, each stored once under a keyed hash of itself, and a book that says
how often each set was released with which guarantee. The ledger's line names its set. What a record has paid
is the composition of the charges whose sets hold it, and of all charges that name no set: those of earlier
versions, and whatever the book lacks. So charges that a lost or older book lacks are paid by every record.

A record whose own payments would pass the limit is left out of a release in silence: the maximum over records
that exist depends on data, so that it never decides a refusal, and never leaves (Feldman and Zrnic 2021).

Records are known by keyed hashes (data/splits.py). One that appears where another record lay before
shares that one's line of payments, because it may be the same one, encoded anew.
"""

import hmac
import json
import sqlite3
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from perennial.foundation.errors import StateError
from perennial.foundation.files import make_folder, replace_file, transaction
from perennial.foundation.record_key import BOOK, FOLDER, SETS, record_key
from perennial.privacy.composition import Cost, compose
from perennial.privacy.config import Unit
from perennial.privacy.entries import Entry
from perennial.privacy.ledger import Ledger, Limit
from perennial.privacy.ledger_tip import guarantee
from perennial.privacy.spending import NOTHING, Spent

TABLES = (
    "record (id BLOB PRIMARY KEY, line BLOB) WITHOUT ROWID",
    "place (id BLOB PRIMARY KEY, line BLOB) WITHOUT ROWID",
    "charged (name TEXT, guarantee TEXT, count INTEGER, PRIMARY KEY (name, guarantee))",
)
Ids = np.ndarray
"""(N,) of 16 bytes each (dtype S16)."""


def as_ids(identities: np.ndarray) -> Ids:
    """(N,) ids, of 16 bytes each, from identities (N, 16) uint8."""
    return np.ascontiguousarray(identities).view("S16").reshape(-1)


@dataclass(frozen=True)
class ChargedSet:
    """The charges of one set of records. ids: sorted; None: the set is lost, so every record pays for it."""

    ids: Ids | None
    counts: Mapping[Entry, int]


@dataclass(frozen=True)
class Payments:
    """All charges. by_all: those that every record pays. version: number of charges of sets so far."""

    by_all: Mapping[Entry, int]
    sets: tuple[ChargedSet, ...]
    version: int

    def of(self, ids: Ids, limit: Limit, entry: Entry) -> tuple[np.ndarray, Spent]:
        """((N, 3) Renyi cost, epsilon and delta that each record has paid; cost of one more entry)."""
        counts = Counter(self.by_all)
        for charged in self.sets:
            counts.update(charged.counts)
        measure = limit.measure([*counts, entry])
        paid = np.tile(_row(measure.of_all(self.by_all)), (len(ids), 1))
        for charged in self.sets:
            members = _members(ids, charged)
            cost = NOTHING
            for released, count in charged.counts.items():
                cost += measure.of_one(released).times(count)
            paid[members] += _row(cost)
        return paid, measure.of_one(entry)

    def counts(self, one: Ids) -> dict[Entry, int]:
        """How often one record, (1,), has paid for each kind of release."""
        found = Counter(self.by_all)
        for charged in self.sets:
            if _members(one, charged)[0]:
                for entry, count in charged.counts.items():
                    found[replace(entry, part="")] += count
        return dict(found)

    def affordable(self, ids: Ids, limit: Limit, entry: Entry) -> np.ndarray:
        """(N,) bool: whether each record can pay for the entry without passing the limit."""
        paid, more = self.of(ids, limit, entry)
        after = paid + _row(more)
        measure = limit.measure([*self.by_all, *(e for s in self.sets for e in s.counts), entry])
        distinct, index = np.unique(after, axis=0, return_inverse=True)
        fits = [measure.epsilon(Spent(*map(float, row)), limit.delta) <= limit.epsilon for row in distinct]
        return np.array(fits, dtype=bool)[index.reshape(-1)]


class RecordBook:
    """The record book: folder records/ of a site's state_dir, safe for several processes. key: for hashes."""

    def __init__(self, state_dir: Path, key: bytes) -> None:
        self.folder, self._key = state_dir / FOLDER, key
        self._path = self.folder / BOOK

    def lines_of(self, records: np.ndarray, places: np.ndarray) -> Ids:
        """(N,) id under which each record's payments are counted; new records are added to the book.

        records, places: (N, 16) uint8, keyed hashes of content and of where it was read. A record that is not
        known continues the payments of the record that was at its place before, if any.
        """
        own, lying = as_ids(records).tolist(), as_ids(places).tolist()
        with self._open() as book:
            known = dict(book.execute("SELECT id, line FROM record"))
            before = dict(book.execute("SELECT id, line FROM place"))
            found, new, moved = [], {}, {}
            for record, place in zip(own, lying, strict=True):
                line = known.get(record) or new.get(record) or before.get(place, record)
                if record not in known:
                    new[record] = line
                if before.get(place) != line:
                    moved[place] = line
                found.append(line)
            book.executemany("INSERT INTO record VALUES (?, ?)", new.items())
            book.executemany("INSERT OR REPLACE INTO place VALUES (?, ?)", moved.items())
        return np.array(found, dtype="S16")

    def payments(self, ledger: Ledger) -> Payments:
        """All charges in the ledger, divided by the set of records that pays for them."""
        with self._open() as book:
            # in here no charge comes between: charge() has the book open, too
            sets, version, rest = self._sets(book), _version(book), Counter(ledger.totals())
        for charged in sets:
            rest.subtract(charged.counts)
        by_all = {replace(entry, part=""): 0 for entry, count in rest.items() if count > 0}
        for entry, count in rest.items():
            if count > 0:
                by_all[replace(entry, part="")] += count
        return Payments(by_all, sets, version)

    def charge(
        self, ledger: Ledger, entry: Entry, limit: Limit | None, ids: Ids, version: int | None = None
    ) -> None:
        """Charge a release to the ledger and to the records with these ids.

        version: of the Payments by which the records were chosen; None: they were not chosen by payments.
        Raises StateError when another set was charged since, or the set cannot be stored, and whatever
        Ledger.charge() raises; then the release must not leave.
        """
        members = np.unique(ids)
        name = self._name(members)
        with self._open() as book:
            if version is not None and version != _version(book):
                raise StateError(
                    f"{self._path}: another release was charged while this one was made; ask again"
                )
            place = self.folder / SETS / name
            if not place.exists():
                make_folder(place.parent)
                replace_file(place, members.astype("S16").tobytes())
            of_entry = json.dumps(guarantee(entry).to_json(), sort_keys=True)
            book.execute("INSERT OR IGNORE INTO charged VALUES (?, ?, 0)", (name, of_entry))
            book.execute(
                "UPDATE charged SET count = count + 1 WHERE name = ? AND guarantee = ?", (name, of_entry)
            )
            ledger.charge(replace(entry, records=name), limit)

    def every_line(self) -> Ids:
        """(N,) sorted ids of all records in any stored set."""
        with self._open() as book:
            found = [charged.ids for charged in self._sets(book) if charged.ids is not None]
        return np.unique(np.concatenate(found)) if found else np.empty(0, dtype="S16")

    def _sets(self, book: sqlite3.Connection) -> tuple[ChargedSet, ...]:
        found: dict[str, dict[Entry, int]] = {}
        for name, of_entry, count in book.execute("SELECT name, guarantee, count FROM charged"):
            blank = dict.fromkeys(("run", "experiment", "recipient", "kind"), "")
            found.setdefault(name, {})[Entry.from_json(blank | json.loads(of_entry))] = count
        return tuple(ChargedSet(self._read(name), counts) for name, counts in found.items())

    def _read(self, name: str) -> Ids | None:
        try:
            ids = np.frombuffer((self.folder / SETS / name).read_bytes(), dtype="S16")
        except (OSError, ValueError):
            return None
        return ids if hmac.compare_digest(self._name(ids), name) else None

    def _name(self, members: Ids) -> str:
        """A keyed hash: receipts carry the ledger's hash, so that nothing in it may tell of a set."""
        return hmac.digest(self._key, b"set:" + members.astype("S16").tobytes(), "sha256").hex()

    def _open(self) -> AbstractContextManager[sqlite3.Connection]:
        return transaction(self._path, TABLES, "nothing may leave")


def _version(book: sqlite3.Connection) -> int:
    return book.execute("SELECT coalesce(sum(count), 0) FROM charged").fetchone()[0]


def _members(ids: Ids, charged: ChargedSet) -> np.ndarray:
    """(N,) bool: which of the records the set holds."""
    return np.ones(len(ids), dtype=bool) if charged.ids is None else np.isin(ids, charged.ids)


def _row(spent: Spent) -> np.ndarray:
    return np.array([spent.renyi, spent.epsilon, spent.delta])


# The dearest record depends on which records there are, so nothing here ever leaves the site.


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
