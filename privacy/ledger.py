"""A site's ledger: every release that ever left it, across rounds, runs and restarts.

A line is on the disk before its release leaves, so a crash can count a release that was never sent and never
miss one that was. Lines only get added; each holds the SHA-256 of the line before, so that a line that was
changed or removed in between is noticed. That finds damage and careless edits; it cannot find the removal of
the newest lines or a file that was rewritten as a whole, which takes a copy of `head` kept elsewhere.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from perennial.foundation.errors import PrivacyError, StateError
from perennial.foundation.files import flush_folder
from perennial.privacy.composition import Cost, compose
from perennial.privacy.config import AccountantName
from perennial.privacy.entries import Entry, Unit

_BEFORE_FIRST = "0" * 64
_LOCK_SECONDS = 60.0


@dataclass(frozen=True)
class Limit:
    """The most that a site may spend over its life. unit None: the largest one that every release hides."""

    epsilon: float
    delta: float
    accountant: AccountantName = "prv"
    unit: Unit | None = None


@dataclass(frozen=True)
class _Contents:
    """entries: charged releases. last: hash of the newest line. torn: what a crash left of a line.

    lines: the file up to its last newline. ended: whether the newest line has its newline.
    """

    entries: list[Entry]
    last: str
    lines: bytes = b""
    torn: bytes = b""
    ended: bool = True


_EMPTY = _Contents([], _BEFORE_FIRST)


class Ledger:
    """The file ledger.jsonl in a site's state_dir, mode 0600, safe for several processes at once.

    Keep the object for several charges: lines whose chain it has verified are compared, not parsed again.
    """

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / "ledger.jsonl"
        self._verified = _EMPTY

    def charge(self, entry: Entry, limit: Limit | None = None) -> None:
        """Record a release; when this returns, the line survives a power cut, and the release may leave.

        limit: refuse, and record nothing, when the life of the site would cost more with this release. Check
        and record are one step: two processes cannot both take what is left for one.
        Raises PrivacyError when the limit would be passed, StateError when the ledger is damaged, locked or
        cannot be written (a full disk, say). After either, the release must not leave.
        """
        with self._locked() as descriptor:
            data = _read(descriptor)
            contents = self._parse(data)
            if limit is not None:
                _refuse_above(limit, contents.entries, entry)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            addition, last = b"" if contents.ended else b"\n", contents.last
            kept = data[: len(data) - len(contents.torn)]
            if contents.torn:
                os.ftruncate(descriptor, len(kept))
                repair = {"repair": contents.torn[:200].decode(errors="replace"), "time": now}
                addition, last = _extend(addition, last, repair)
            charged = replace(entry, time=now)
            addition, last = _extend(addition, last, charged.to_json())
            self._append(descriptor, addition, len(kept))
            self._verified = _Contents([*contents.entries, charged], last, kept + addition)

    def entries(self) -> tuple[Entry, ...]:
        """All charged releases, oldest first; empty without a file. Raises StateError on a damaged file."""
        return tuple(self._contents().entries)

    def head(self) -> tuple[int, str]:
        """(number of releases, hash of the newest line): what to note elsewhere, to find later removals."""
        contents = self._contents()
        return len(contents.entries), contents.last

    def cost(self, delta: float, accountant: AccountantName = "prv", unit: Unit | None = None) -> Cost:
        """What all releases so far cost together."""
        return compose(self.entries(), delta, accountant, unit)

    def would_cost(
        self, entry: Entry, delta: float, accountant: AccountantName = "prv", unit: Unit | None = None
    ) -> Cost:
        """What they would cost with one more. Records nothing."""
        return compose([*self.entries(), entry], delta, accountant, unit)

    def remaining(self, limit: Limit) -> float:
        """Epsilon left under the limit; 0 when it is used up. Not a promise: releases do not cost alike."""
        cost = self.cost(limit.delta, limit.accountant, limit.unit)
        return max(0.0, limit.epsilon - cost.epsilon)

    def _contents(self) -> _Contents:
        if not self.path.exists():
            return _EMPTY
        with self._locked() as descriptor:
            return self._parse(_read(descriptor))

    def _parse(self, data: bytes) -> _Contents:
        """Entries of the file, with the chain verified. Raises StateError naming the line that breaks it.

        Only what follows the last newline may be torn: a newline is on the disk before its charge returns. A
        tail that is complete but for the newline is counted; any other belongs to a release that never left.
        """
        before = self._verified if data.startswith(self._verified.lines) else _EMPTY
        *lines, tail = data[len(before.lines) :].split(b"\n")
        entries, last = [*before.entries], before.last
        for place, line in enumerate(lines):
            if not _read_line(line, last, entries):
                number = before.lines.count(b"\n") + place + 1
                raise StateError(
                    f"{self.path}: line {number} does not follow from the line before it; a line was changed "
                    "or removed, so the cost so far cannot be trusted and nothing may leave. Restore it from "
                    "a copy"
                )
            last = sha256(line).hexdigest()
        whole = self._verified = _Contents(entries, last, data[: len(data) - len(tail)])
        if not tail:
            return whole
        entries = [*entries]
        if _read_line(tail, last, entries):
            return replace(whole, entries=entries, last=sha256(tail).hexdigest(), ended=False)
        return replace(whole, torn=tail)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The open file, for this process alone."""
        new = False
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            try:
                descriptor = os.open(self.path, flags)
            except FileNotFoundError:
                new = True
                self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                descriptor = os.open(self.path, flags | os.O_CREAT, 0o600)
        except OSError as error:
            raise StateError(
                f"{self.path}: the ledger cannot be opened ({error.strerror}); nothing may leave"
            ) from error
        try:
            os.fchmod(descriptor, 0o600)
            if new:
                flush_folder(self.path.parent)
            _wait_for_lock(descriptor, self.path)
            yield descriptor
        finally:
            os.close(descriptor)

    def _append(self, descriptor: int, data: bytes, size: int) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.write(descriptor, data[written:])
            os.fsync(descriptor)
        except OSError as error:
            if written < len(data):
                with suppress(OSError):
                    os.ftruncate(descriptor, size)
            raise StateError(
                f"{self.path}: the release could not be recorded ({error.strerror}), so it must not leave; "
                "free space or repair the disk"
            ) from error


def _refuse_above(limit: Limit, entries: Sequence[Entry], entry: Entry) -> None:
    after = compose([*entries, entry], limit.delta, "rdp", limit.unit)
    # Both bound from above and RDP answers at once, so the slower one is asked only where RDP refuses.
    if after.epsilon > limit.epsilon and limit.accountant != "rdp":
        after = compose([*entries, entry], limit.delta, limit.accountant, limit.unit)
    if after.epsilon > limit.epsilon:
        raise PrivacyError(
            f"the {entry.kind} for {entry.recipient} would bring this site's lifetime epsilon to "
            f"{after.epsilon:.4g} ({after.unit}, delta {limit.delta:g}, {after.accountant}); its limit is "
            f"{limit.epsilon:g}"
        )


def _wait_for_lock(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StateError(
                    f"{path}: held by another process for {_LOCK_SECONDS:.0f} s, so nothing may leave"
                ) from None
            time.sleep(0.02)


def _read(descriptor: int) -> bytes:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return file.read()


def _extend(addition: bytes, previous: str, values: dict[str, Any]) -> tuple[bytes, str]:
    """The bytes to add with one more line, and that line's hash."""
    line = json.dumps({"previous": previous} | values, allow_nan=False, separators=(",", ":")).encode()
    return addition + line + b"\n", sha256(line).hexdigest()


def _read_line(line: bytes, previous: str, entries: list[Entry]) -> bool:
    """Whether line is an entry or a repair that follows previous; an entry is added to entries."""
    try:
        values = json.loads(line)
        if not isinstance(values, dict) or values.pop("previous", None) != previous:
            return False
        if "repair" not in values:
            entries.append(Entry.from_json(values))
    except (ValueError, RecursionError, PrivacyError):
        return False
    return True
