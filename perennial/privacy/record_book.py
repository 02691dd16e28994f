"""Which records were in each part of a run, so that none is in two of them.

The public account (privacy/composition.py) counts the dearest part of a run's data, such as one task's, and
not their sum. That is right for a record that is in one part. A record whose label changed between two tasks
of a run would be in both. So beside the ledger lie the contents that each part held when it was released,
copies repeated, each content under a keyed hash: from them client/training_samples.py finds the rows that
have left another part, and leaves them out. All other releases count every record, and need no sets.

A set holds all rows of its part, also those that were left out of the release: what one release left out
decides nothing about the next one. It is on the disk before the charge, so that no charge is without its set.
"""

import hmac
import json
import sqlite3
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np

from perennial.foundation.errors import StateError
from perennial.foundation.files import make_folder, open_transaction, replace_file
from perennial.foundation.record_key import BOOK, FOLDER, SETS
from perennial.privacy.entries import Entry
from perennial.privacy.ledger_tip import Totals, extract_guarantee

TABLES = ("charged (name TEXT, guarantee TEXT, count INTEGER, PRIMARY KEY (name, guarantee))",)
"""A book of an earlier release has two more, which nothing reads."""
_REMEDY = "put a copy of the folder back, or take part in a new run"
Ids = np.ndarray
"""(N,) of 16 bytes each (dtype S16)."""


NO_IDS: Ids = np.empty(0, dtype="S16")


def as_ids(identities: np.ndarray) -> Ids:
    """(N,) ids, of 16 bytes each, from identities (N, 16) uint8."""
    return np.ascontiguousarray(identities).view("S16").reshape(-1)


def count_times(ids: Ids, contents: Ids) -> np.ndarray:
    """(M,) int64: how often each of contents, (M,), is in ids, (N,) sorted."""
    return np.searchsorted(ids, contents, "right") - np.searchsorted(ids, contents, "left")


class RecordBook:
    """The record book: folder records/ of a site's state_dir, safe for several processes. key: for hashes."""

    def __init__(self, state_dir: Path, key: bytes) -> None:
        self.folder, self._key = state_dir / FOLDER, key
        self._path = self.folder / BOOK

    def note(self, entry: Entry, ids: Ids) -> Entry:
        """Note the rows of a part before its release is charged; returns the entry with the set's name.

        ids: (N,) of all rows of the part, in any order. Raises StateError when the set cannot be stored; then
        the release must not leave.
        """
        members = np.sort(ids)
        name = self._name(members)
        of_entry = json.dumps(extract_guarantee(entry).to_json(), sort_keys=True)
        with self._open() as book:
            place = self.folder / SETS / name
            if not place.exists():
                make_folder(place.parent)
                replace_file(place, members.tobytes())
            book.execute("INSERT OR IGNORE INTO charged VALUES (?, ?, 0)", (name, of_entry))
            book.execute(
                "UPDATE charged SET count = count + 1 WHERE name = ? AND guarantee = ?", (name, of_entry)
            )
        return replace(entry, records=name)

    def read_other_parts(self, entry: Entry, charged: Totals) -> dict[str, list[Ids]]:
        """The sets, each sorted, of every other part of the entry's scope.

        charged: all of the ledger. Raises StateError where a set was lost: no row could be told from those
        that it held.
        """
        sets, noted = {}, Counter[str]()
        with self._open() as book:
            for name, of_entry, count in book.execute("SELECT name, guarantee, count FROM charged"):
                part = json.loads(of_entry).get("part", "")
                if _is_other(part, entry):
                    sets.setdefault(part, []).append(self._read(name))
                    noted[part] += count
        for released, count in charged.items():
            noted[released.part] -= count if _is_other(released.part, entry) else 0
        for part, left in noted.items():
            if left < 0:
                task = part.rpartition("/")[2]
                raise StateError(
                    f"{self._path}: lacks the rows of {task} of this run, which was charged; {_REMEDY}"
                )
        return sets

    def _read(self, name: str) -> Ids:
        path = self.folder / SETS / name
        try:
            content = path.read_bytes()
            ids = np.frombuffer(content, dtype="S16") if content else NO_IDS
        except (OSError, ValueError) as error:
            raise StateError(f"{path}: cannot be read ({error}); {_REMEDY}") from error
        if not hmac.compare_digest(self._name(ids), name):
            raise StateError(f"{path}: was changed; {_REMEDY}")
        return ids

    def _name(self, members: Ids) -> str:
        """A keyed hash: receipts carry the ledger's hash, so that nothing in it may tell of a set."""
        return hmac.digest(self._key, b"set:" + members.astype("S16").tobytes(), "sha256").hex()

    def _open(self) -> AbstractContextManager[sqlite3.Connection]:
        return open_transaction(self._path, TABLES, "nothing may leave")


def _is_other(part: str, entry: Entry) -> bool:
    """Whether a part, "SCOPE/NAME", is another one of the entry's scope."""
    return part != entry.part and part.rpartition("/")[0] == entry.scope
