"""The lines of a ledger: how they are chained, read from a tip on, and checked again in turn."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from perennial.foundation.errors import PrivacyError, StateError
from perennial.privacy.entries import Entry
from perennial.privacy.ledger_tip import Tip, TipPosition, Totals, add_release, from_listed, hash_totals

CHECKED_EACH_TIME = 2**20
"""Bytes of older lines whose chain is checked again at each charge."""
_PIECE = 2**20
CARRIED = "carried"
"""Key of a first line that says what an earlier, lost ledger had counted."""
REMEDY = "Put the newest copy of the ledger back; if there is none, see 'A lost ledger' in docs/operations.md"


@dataclass(frozen=True)
class Contents:
    """The whole ledger. tip: up to its last newline. tail: what follows that.

    counted: the release in the tail when it lacks its newline alone; any other tail is what a crash left of a
    release that never left.
    """

    tip: Tip
    tail: bytes = b""
    counted: Entry | None = None

    @property
    def totals(self) -> Totals:
        return self.tip.totals if self.counted is None else add_release(self.tip.totals, self.counted)


@dataclass
class Addition:
    """Lines that will be appended, and the tip after them."""

    tip: Tip
    data: bytes = b""

    def line(self, values: dict[str, Any], totals: Totals) -> None:
        """Append one line; totals: after it."""
        chained = {"previous": self.tip.mark.last, "totals": hash_totals(totals)} | values
        line = json.dumps(chained, allow_nan=False, separators=(",", ":")).encode()
        self.data += line + b"\n"
        self.tip = advance_tip(self.tip, line, totals)


def advance_tip(tip: Tip, line: bytes, totals: Totals) -> Tip:
    """The tip after one more line, given without its newline. totals: after it."""
    mark = TipPosition(tip.mark.bytes + len(line) + 1, tip.mark.lines + 1, sha256(line).hexdigest())
    return replace(tip, mark=mark, totals=totals, newest=len(line) + 1)


def read_newest_line(descriptor: int, tip: Tip) -> bytes | None:
    """The line that ends at a tip, without newline; None if the open ledger does not have it there."""
    start = tip.mark.bytes - tip.newest
    data = os.pread(descriptor, tip.newest, start) if start >= 0 else b""
    line = data[:-1]
    intact = len(data) == tip.newest and data.endswith(b"\n") and sha256(line).hexdigest() == tip.mark.last
    return line if intact else None


def is_committed(descriptor: int, tip: Tip) -> bool:
    """Whether the tip's totals are those of its newest line; False for lines of earlier versions."""
    line = read_newest_line(descriptor, tip) if tip.mark != TipPosition() else None
    try:
        values = json.loads(line) if line is not None else {}
    except (ValueError, RecursionError):
        return False
    return isinstance(values, dict) and values.get("totals") == hash_totals(tip.totals)


def read_on(descriptor: int, tip: Tip, path: Path, entries: list[Entry] | None = None) -> Contents:
    """Read and check the ledger from a tip to its end. entries: a list to which the releases are added.

    Only what follows the last newline may be torn: a newline is on the disk before its charge returns. Raises
    StateError naming the line that breaks the chain.
    """
    totals, mark, newest = tip.totals, tip.mark, tip.newest
    tail = b""
    for line, ended in _read_lines(descriptor, mark.bytes):
        if not ended:
            tail = line
            break
        found = _read_line(line, mark, totals)
        if found is None:
            raise _make_broken_error(path, mark.lines + 1)
        entry, totals = found
        if entries is not None and entry is not None:
            entries.append(entry)
        newest = len(line) + 1
        mark = TipPosition(mark.bytes + newest, mark.lines + 1, sha256(line).hexdigest())
    contents = Contents(Tip(mark, totals, newest, tip.checked), tail)
    found = _read_line(tail, mark, totals) if tail else None
    if found is None or found[0] is None:
        return contents
    if entries is not None:
        entries.append(found[0])
    return replace(contents, counted=found[0])


def _read_lines(descriptor: int, start: int) -> Iterator[tuple[bytes, bool]]:
    """(line, whether it has its newline) from a place in the file on, in pieces of bounded size."""
    rest = b""
    while piece := os.pread(descriptor, _PIECE, start):
        start += len(piece)
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line, True
    if rest:
        yield rest, False


def check_older(descriptor: int, tip: Tip, path: Path) -> TipPosition:
    """Check the chain of the next few older lines, from tip.checked on; returns where the next check begins.

    Raises StateError naming the line that breaks the chain.
    """
    at = tip.checked if tip.checked.bytes < tip.mark.bytes else TipPosition()
    turn = left = min(CHECKED_EACH_TIME, tip.mark.bytes)
    while left > 0:
        data = os.pread(descriptor, min(left, tip.mark.bytes - at.bytes), at.bytes)
        *lines, partial = data.split(b"\n")
        if not lines and left == turn:
            raise _make_broken_error(path, at.lines + 1)
        if not lines:
            break  # what is left of this turn is less than a line
        for line in lines:
            if not line.startswith(b'{"previous":"%s"' % at.last.encode()):
                raise _make_broken_error(path, at.lines + 1)
            at = TipPosition(at.bytes + len(line) + 1, at.lines + 1, sha256(line).hexdigest())
        left -= len(data) - len(partial)
        if at.bytes == tip.mark.bytes:
            if at.last != tip.mark.last:
                raise _make_broken_error(path, at.lines)
            at = TipPosition()
    return at


def _make_broken_error(path: Path, number: int) -> StateError:
    return StateError(
        f"{path}: line {number} does not follow from the line before it; a line was changed or removed, so "
        f"the cost so far cannot be trusted and nothing may leave. {REMEDY}"
    )


def _read_line(line: bytes, before: TipPosition, totals: Totals) -> tuple[Entry | None, Totals] | None:
    """(the release in a line, or None for a note, and the totals after it); None when it does not follow.

    before, totals: of what comes before the line.
    """
    entry = None
    try:
        values = json.loads(line)
        if not isinstance(values, dict) or values.pop("previous", None) != before.last:
            return None
        promised = values.pop("totals", None)
        if CARRIED in values:
            totals = from_listed(values[CARRIED])
            if before != TipPosition() or promised is None:
                return None
        elif "repair" not in values:
            entry = Entry.from_json(values)
            totals = add_release(totals, entry)
    except (ValueError, TypeError, RecursionError, PrivacyError):
        return None
    return (entry, totals) if promised in (None, hash_totals(totals)) else None
