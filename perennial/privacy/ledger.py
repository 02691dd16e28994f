"""A site's ledger: every release that ever left it, across rounds, runs and restarts.

A line is on the disk before its release leaves, so a crash can count a release that was never sent and never
miss one that was. Lines only get added; each holds the SHA-256 of the line before and that of the totals.
A tip (privacy/ledger_tip.py) says how far the ledger went. One is beside the ledger, and a site can have a
second one elsewhere, on another disk. A ledger that lacks what a tip noted was deleted, truncated, changed
or replaced by an older copy: then nothing may leave. A ledger that goes on after a tip is in order, because
the line is written before the tips. That the ledger and both tips were put back together, nobody notices.

A charge reads the tip, what was added since, and a fixed amount of older lines, in turn, so that it costs
the same at any length.
"""

import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from perennial.foundation.errors import PrivacyError, StateError
from perennial.foundation.files import flush_folder, make_folder
from perennial.privacy.composition import Cost, compose
from perennial.privacy.config import AccountantName, Unit
from perennial.privacy.entries import Entry
from perennial.privacy.ledger_lines import (
    CARRIED,
    REMEDY,
    Addition,
    Contents,
    advance_tip,
    check_older,
    is_committed,
    read_newest_line,
    read_on,
)
from perennial.privacy.ledger_tip import (
    MOST_GUARANTEES,
    Tip,
    TipPosition,
    Totals,
    add_release,
    list_totals,
    require_own_data,
)
from perennial.privacy.spending import Measure

_LOCK_SECONDS = 60.0


@dataclass(frozen=True)
class Limit:
    """The most that a site may spend over its life. unit None: the largest one that every release hides."""

    epsilon: float
    delta: float
    unit: Unit | None = None

    def measure(self, entries: Iterable[Entry]) -> Measure:
        """The Measure in which spending on these releases is compared with this limit."""
        return Measure.of(entries, self.epsilon, self.delta, self.unit)


class Ledger:
    """The file ledger.jsonl in a site's state_dir, mode 0600, safe for several processes at once.

    elsewhere: a file for a second tip, outside state_dir; None, at a simulated site: there is none. data: the
    file or folder of the data that it counts, which no other ledger may count; None: not known.
    """

    def __init__(self, state_dir: Path, elsewhere: Path | None = None, data: Path | None = None) -> None:
        self.path = state_dir / "ledger.jsonl"
        self.beside = state_dir / "ledger.tip"
        self.elsewhere = elsewhere
        self.data = data

    def charge(self, entry: Entry, limit: Limit | None = None) -> None:
        """Record a release; when this returns, the line survives a power cut, and the release may leave.

        limit: refuse, and record nothing, when the life of the site would cost more with this release. Check
        and record are one step: two processes cannot both take what is left for one.
        Raises PrivacyError when the limit would be passed, StateError when the ledger is damaged, locked,
        older than a tip, or cannot be written (a full disk, say). After either, the release must not leave.
        """
        if self.elsewhere is not None and self.data is not None:
            require_own_data(self.data, self.path.parent)
        with self._lock() as descriptor:
            contents = self._read_contents(descriptor)
            tip = contents.tip
            if len(add_release(contents.totals, entry)) > MOST_GUARANTEES:
                raise PrivacyError(
                    f"the {entry.kind} for {entry.recipient} has yet another guarantee; a ledger counts "
                    f"{MOST_GUARANTEES} different ones at most"
                )
            if limit is not None:
                _refuse_above(limit, contents.totals, entry)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            addition = Addition(tip)
            if contents.counted is not None:
                addition.data, addition.tip = b"\n", advance_tip(tip, contents.tail, contents.totals)
            elif contents.tail:
                os.ftruncate(descriptor, tip.mark.bytes)
                repair = {"repair": contents.tail[:200].decode(errors="replace"), "time": now}
                addition.line(repair, tip.totals)
            charged = replace(entry, time=now)
            addition.line(charged.to_json(), add_release(addition.tip.totals, charged))
            size = tip.mark.bytes + (len(contents.tail) if contents.counted is not None else 0)
            self._append(descriptor, addition.data, size)
            self._note(addition.tip)

    def require_within(self, entry: Entry, limit: Limit | None) -> None:
        """Raises PrivacyError when the limit would be passed by this release; records nothing."""
        if limit is not None:
            _refuse_above(limit, self.totals(), entry)

    def read_entries(self) -> tuple[Entry, ...]:
        """All charged releases, oldest first, after a check of the whole file; empty without a file.

        Raises StateError on a damaged file, or one that is older than a tip.
        """
        entries: list[Entry] = []
        if self.started:
            with self._lock() as descriptor:
                self._read_contents(descriptor)
                read_on(descriptor, Tip(TipPosition(), {}), self.path, entries)
        return tuple(entries)

    def mark(self) -> tuple[TipPosition, int] | None:
        """(tip position, bytes of the newest line) by the tip beside the ledger; None without a readable tip.

        After a crash it can be a line behind.
        """
        try:
            tip = Tip.read(self.beside)
        except StateError:
            return None
        return None if tip is None or tip.mark == TipPosition() else (tip.mark, tip.newest)

    def record_tip(self) -> int:
        """Check the whole ledger and write its tip in both places; returns the number of releases in it.

        For a place whose tip was lost. Raises StateError when the ledger lacks what another tip has noted.
        """
        with self._lock() as descriptor:
            for path in self._list_tips():
                self._require_noted(descriptor, path, Tip.read(path))
            contents = read_on(descriptor, Tip(TipPosition(), {}), self.path)
            self._note(contents.tip)
            return contents.tip.releases

    def restart(self) -> tuple[Path, int]:
        """Begin a new ledger with what the newest tip has counted, for a site that lost the old one.

        Returns where what was left of the old one lies now, and how many releases
        were carried over. Raises StateError without a tip: then nobody knows what was spent.
        """
        found = [tip for path in reversed(self._list_tips()) if (tip := Tip.read(path)) is not None]
        if not found:
            raise StateError(f"{self.path}: no tip was noted, so nothing is known of what was spent")
        tip = found[0]  # the one elsewhere, which nobody who can change the ledger can change, comes first
        lost = self.path.with_name(f"{self.path.name}.lost-{datetime.now(UTC):%Y%m%dT%H%M%S}")
        with self._lock() as descriptor:
            os.rename(self.path, lost)
            flush_folder(self.path.parent)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        with self._lock() as descriptor:
            addition = Addition(Tip(TipPosition(), {}))
            now = datetime.now(UTC).isoformat(timespec="seconds")
            addition.line({CARRIED: list_totals(tip.totals), "time": now}, tip.totals)
            self._append(descriptor, addition.data, 0)
            self._note(addition.tip)
        return lost, tip.releases

    def cost(self, delta: float, accountant: AccountantName = "prv", unit: Unit | None = None) -> Cost:
        """The privacy cost of all releases so far. unit: what it shall hide; None: the largest all hide."""
        return compose(self.totals(), delta, accountant, unit)

    @property
    def started(self) -> bool:
        """Whether there is a ledger, or a tip that says that there was one."""
        return self.path.exists() or any(path.exists() for path in self._list_tips())

    def totals(self) -> Totals:
        """Number of releases by their guarantee."""
        if not self.started:
            return {}
        with self._lock() as descriptor:
            return self._read_contents(descriptor).totals

    def _list_tips(self) -> list[Path]:
        return [self.beside] if self.elsewhere is None else [self.beside, self.elsewhere]

    def _read_contents(self, descriptor: int) -> Contents:
        """What the ledger holds, from the newest tip on.

        Raises StateError when the ledger lacks what a tip noted, or when the second tip is missing.
        """
        try:
            found = Tip.read(self.beside)
        except StateError:
            found = None  # a power cut may leave it damaged; then the ledger is read from its first line
        if found is not None:
            self._require_noted(descriptor, self.beside, found)
        start = found if found is not None and is_committed(descriptor, found) else Tip(TipPosition(), {})
        contents = read_on(descriptor, start, self.path)
        checked = check_older(descriptor, contents.tip, self.path)
        contents = replace(contents, tip=replace(contents.tip, checked=checked))
        if self.elsewhere is not None:
            noted = Tip.read(self.elsewhere)
            # a ledger of an earlier release has no tip elsewhere yet, and its own tip says so
            if noted is None and contents.totals and (found is None or found.elsewhere):
                raise StateError(
                    f"ledger_tip: no file {self.elsewhere}, although this site has released something, so "
                    "nothing may leave. Put the file back; or make sure that the ledger is the newest one, "
                    "and run `perennial site restart-ledger --as-it-is`"
                )
            self._require_noted(descriptor, self.elsewhere, noted)
        return contents

    def _require_noted(self, descriptor: int, place: Path, tip: Tip | None) -> None:
        """Raises StateError when the ledger lacks the newest line that a tip noted."""
        if tip is None or tip.mark == TipPosition():
            return
        if read_newest_line(descriptor, tip) is None:
            raise StateError(
                f"{self.path}: lacks line {tip.mark.lines}, which {place} has noted: the ledger was "
                "deleted, truncated, changed, or replaced by an older copy. What was spent cannot be known, "
                f"so nothing may leave. {REMEDY}"
            )

    def _note(self, tip: Tip) -> None:
        """Write both tips; the ledger is on the disk already, so either may be a line behind after a crash.

        The one beside the ledger saves time, and a damaged one is not believed, so it need not
        wait for the disk.
        """
        if self.elsewhere is not None:
            try:
                make_folder(self.elsewhere.parent)
                tip = replace(tip, elsewhere=True)
                tip.write(self.elsewhere, durable=True)
            except StateError as error:
                raise StateError(f"ledger_tip: {error}; without it the release must not leave") from error
        tip.write(self.beside, durable=False)

    @contextmanager
    def _lock(self) -> Iterator[int]:
        """The open file, for this process alone."""
        new = False
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            try:
                descriptor = os.open(self.path, flags)
            except FileNotFoundError:
                new = True
                make_folder(self.path.parent)
                descriptor = os.open(self.path, flags | os.O_CREAT, 0o600)
        except (OSError, StateError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise StateError(
                f"{self.path}: the ledger cannot be opened ({why}); nothing may leave"
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


def _refuse_above(limit: Limit, totals: Totals, entry: Entry) -> None:
    """Raises PrivacyError when a record that could exist would pay more, by what is public of all releases.

    Which records there are decides nothing, so that a refusal tells nothing of them.
    """
    counts = add_release(totals, entry)
    measure = limit.measure(counts)
    epsilon = measure.epsilon(measure.of_all(counts), limit.delta)
    if epsilon > limit.epsilon:
        raise PrivacyError(
            f"policy.max_epsilon: the {entry.kind} for {entry.recipient} would bring this site's lifetime "
            f"epsilon to {epsilon:.4g} ({measure.unit}, delta {limit.delta:g}, at Renyi order "
            f"{measure.order:g}); its limit is {limit.epsilon:g}"
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
