"""The tip of a ledger: how far it went, and what all of it costs, in a file of constant size.

A process that charges a release goes on from the tip and need not read the ledger from its first line. The
tip proves nothing by itself: the newest line that it names must stand in the ledger where it says, and that
line holds the SHA-256 of the totals that the tip gives. A ledger that lacks this line was truncated, changed
or replaced by an older copy.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from perennial.foundation.errors import PrivacyError, StateError
from perennial.foundation.files import SHARED_STATE, find_user_state, lock_folder, make_folder, replace_file
from perennial.privacy.entries import Entry

BEFORE_FIRST = "0" * 64
MOST_GUARANTEES = 5_000
"""Different ones that a ledger may hold: a method's settings give a few, a hostile server would give more."""
LARGEST = 4 * 2**20
"""Bytes of a tip's file, with room for as many."""
_WHO = ("run", "experiment", "recipient", "kind", "note", "time", "records")
_OF_A_GUARANTEE = frozenset(field.name for field in fields(Entry)) - set(_WHO)

Totals = Mapping[Entry, int]
"""How many releases had which guarantee, which is all that composition needs."""


def extract_guarantee(entry: Entry) -> Entry:
    """The entry's guarantee alone, without run, recipient or kind, so that equal ones can be counted."""
    return replace(entry, **dict.fromkeys(_WHO, ""))


def add_release(totals: Totals, entry: Entry) -> dict[Entry, int]:
    """The totals after one more release."""
    of_entry = extract_guarantee(entry)
    return {**totals, of_entry: totals.get(of_entry, 0) + 1}


def hash_totals(totals: Totals) -> str:
    """SHA-256 (hex) of the totals, whatever their order."""
    return hashlib.sha256(json.dumps(list_totals(totals), separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class TipPosition:
    """A place between two lines of a ledger: bytes and lines before it, and the hash of the line before."""

    bytes: int = 0
    lines: int = 0
    last: str = BEFORE_FIRST


@dataclass(frozen=True)
class Tip:
    """A ledger up to a mark.

    totals: what was released until there. newest: bytes of the line before the mark, its newline included.
    checked: how far the check of older lines has come; it begins again after the newest line. elsewhere:
    whether it was noted outside state_dir too.
    """

    mark: TipPosition
    totals: Totals
    newest: int = 0
    checked: TipPosition = TipPosition()
    elsewhere: bool = False

    @property
    def releases(self) -> int:
        """Releases until the mark."""
        return sum(self.totals.values())

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The tip in a file; None without a file. Raises StateError when it cannot be read or is damaged."""
        try:
            with path.open("rb") as file:
                data = file.read(LARGEST + 1)
            if len(data) > LARGEST:
                raise ValueError(f"more than {LARGEST} bytes")
            values = json.loads(data)
            totals = from_listed(values["totals"])
            checked, elsewhere = _mark(values["checked"]), bool(values.get("elsewhere"))
            return cls(_mark(values["mark"]), totals, _count(values["newest"]), checked, elsewhere)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StateError(f"{path}: the ledger's tip cannot be read ({error.strerror})") from error
        except (ValueError, TypeError, KeyError, RecursionError, PrivacyError) as error:
            raise StateError(f"{path}: not a ledger's tip, or damaged ({error!r:.200})") from error

    def write(self, path: Path, *, durable: bool) -> None:
        """Replace the tip in a file. durable: wait for the disk. Raises StateError naming the file."""
        values = {
            "mark": vars(self.mark),
            "newest": self.newest,
            "checked": vars(self.checked),
            "totals": list_totals(self.totals),
            "elsewhere": self.elsewhere,
        }
        replace_file(path, json.dumps(values).encode(), durable=durable)


def list_totals(totals: Totals) -> list[tuple[dict[str, Any], int]]:
    """The totals as sorted pairs (entry as JSON, count)."""
    pairs = [(entry.to_json(), count) for entry, count in totals.items()]
    return sorted(pairs, key=lambda pair: json.dumps(pair[0], sort_keys=True))


def from_listed(values: Any) -> dict[Entry, int]:
    """The totals that listed() wrote. Raises ValueError, TypeError or PrivacyError when they are none."""
    return {_parse_entry(of_entry): _count(count, 1) for of_entry, count in values}


def _parse_entry(values: Any) -> Entry:
    if not isinstance(values, dict) or not values.keys() <= _OF_A_GUARANTEE:
        raise ValueError(f"found {values!r:.80}, allowed a guarantee")
    return extract_guarantee(Entry.from_json({**dict.fromkeys(_WHO, ""), **values}))


def _mark(values: Any) -> TipPosition:
    last = values["last"]
    if not isinstance(last, str) or len(last) != len(BEFORE_FIRST):
        raise ValueError(f"found {last!r:.80}, allowed a SHA-256")
    return TipPosition(_count(values["bytes"], 0), _count(values["lines"], 0), last)


def _count(value: Any, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"found {value!r:.80}, allowed a whole number from {least}")
    return value


def require_own_data(data: Path, state_dir: Path) -> None:
    """Note that the ledger in state_dir counts what leaves of these data, in user_state().

    All sites of one user find the note there, whatever their folders and `ledger_tip` are. Data are known by
    their inode, and by their name in a folder, and a ledger by a number in its state_dir, because paths mean
    different things in different containers.

    Args:
        data: the file or folder of the data.
        state_dir: holds the ledger.

    Raises:
        StateError: another ledger counts them already, or nothing can be noted. Nothing may leave then.
    """
    folder = find_user_state()
    try:
        make_folder(folder)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except StateError:
        writable = False
    if not writable:
        raise StateError(
            f"{folder}: cannot be written, so that no other site here would know which ledger counts {data}; "
            f"the release must not leave. {SHARED_STATE}"
        )
    try:
        found, place = data.stat(), data.resolve()
        beside = place.parent.stat()
        known = (
            f"file {found.st_dev} {found.st_ino}",
            f"name {beside.st_dev} {beside.st_ino} {place.name}",
        )
        own = (str(state_dir.resolve()), read_ledger_number(state_dir))
        with lock_folder(folder):
            for name in known:
                _claim(folder / f"{sha256(name.encode()).hexdigest()[:32]}.data", data, own)
    except OSError as error:
        raise StateError(f"{folder}: {error.strerror}; without it the release must not leave") from error


def _claim(claim: Path, data: Path, own: tuple[str, str]) -> None:
    """Note own, (state_dir, number). Raises StateError when another ledger is noted."""
    text = claim.read_text(encoding="utf-8") if claim.exists() else ""
    other, _, number = text.partition("\n")
    # a ledger that moved left no other one behind; a copied state_dir has
    copied = other not in ("", own[0]) and (Path(other) / "ledger.jsonl").exists()
    # notes of an earlier release hold no number
    if copied or number not in ("", own[1]):
        raise StateError(
            f"data.path: what leaves of {data} is counted by the ledger in {other}, and one data set "
            f"has one ledger; allowed: state_dir: {other}, or, if that ledger counts other data now, "
            f"to remove {claim}"
        )
    if text != "\n".join(own):
        replace_file(claim, "\n".join(own).encode())


def read_ledger_number(state_dir: Path) -> str:
    """The number of the ledger in a state_dir, drawn at the first call."""
    path = state_dir / "ledger.number"
    make_folder(state_dir)
    if not path.exists():
        replace_file(path, os.urandom(16).hex().encode())
    return path.read_text(encoding="ascii")
