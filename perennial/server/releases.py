"""Records what each site was asked to release under protection: an upper bound on a run's privacy cost.

A line is on the disk before the requests leave. The same question in the same round counts once: a site
answers it with the bytes that it sent before (client/kept_reply.py). Any other question that follows a crash
counts anew, since its first answers may have been seen, and so does one under a changed experiment or of
another release of Perennial, which a site answers anew. A site that refused released nothing, and is taken
off. This holds for sites that have what they kept: one that lost it answers anew, as its ledger says.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, PlainValidator

import perennial
from perennial.foundation.errors import PrivacyError, StateError
from perennial.foundation.files import flush_folder
from perennial.privacy.entries import Entry
from perennial.protocol.stamp import VERSION

RELEASE = f"{perennial.__version__} protocol {VERSION}"
_Question = tuple[str, str, tuple[Entry, ...]] | None
"""What a site is asked, by which release; the entries name the experiment. None: always a new question."""


class _Kept:
    """What a site has kept of its replies: those of the newest round in which it was asked."""

    def __init__(self) -> None:
        self._round, self._asked = -1, dict[_Question, int]()

    def asked(self, number: int, same: _Question) -> bool:
        """Whether this question costs a release."""
        if number != self._round:
            self._round, self._asked = number, {}
        if same is None:
            return True
        self._asked[same] = self._asked.get(same, 0) + 1
        return self._asked[same] == 1

    def refused(self, same: _Question) -> bool:
        """Whether a release of before may have left, although the latest question was refused."""
        times = self._asked.pop(same, 1)
        if times > 1:
            self._asked[same] = times
        return times > 1


class Releases:
    """releases.jsonl in a run folder: append-only, flushed line by line.

    once: names a release that a site makes once in the run, and sends again when it is asked again. same:
    identifies a question whose reply a site keeps until the next round; '': the question is always new.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "releases.jsonl"

    def asked(
        self, number: int, sites: Iterable[str], entries: Sequence[Entry], once: str = "", same: str = ""
    ) -> None:
        """Record sites that are about to be asked in a round, and the ledger entries that each may charge.

        Raises StateError when that cannot be recorded.
        """
        self._append(number, "asked", sites, entries, once, same)

    def refused(
        self, number: int, sites: Iterable[str], entries: Sequence[Entry], once: str = "", same: str = ""
    ) -> None:
        """Record sites that refused, so that the entries do not count. Arguments as for asked()."""
        self._append(number, "refused", sites, entries, once, same)

    def list_charged(self) -> dict[str, list[Entry]]:
        """site -> the entries that it may have charged to its ledger in this run, at most.

        Raises StateError naming a line that cannot be read.
        """
        times: dict[str, Counter[tuple[str, tuple[Entry, ...]]]] = {}
        kept: dict[str, _Kept] = {}
        for line in self._read_lines():
            release = line.once, line.entries
            for site in line.asked:
                new = kept.setdefault(site, _Kept()).asked(line.round, line.question)
                times.setdefault(site, Counter())[release] += new
            for site in line.refused:
                released = kept.setdefault(site, _Kept()).refused(line.question)
                times.setdefault(site, Counter())[release] -= not released
        return {
            site: [
                entry
                for (once, entries), count in found.items()
                for entry in entries * (min(count, 1) if once else count)
            ]
            for site, found in times.items()
        }

    def _read_lines(self) -> Iterator["_Line"]:
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else []
        for number, line in enumerate(lines, start=1):
            try:
                if line:
                    yield _Line.model_validate_json(line)
            except (ValueError, RecursionError, PrivacyError) as error:
                if number == len(lines):
                    return  # cut short by a crash: nobody was asked
                raise StateError(
                    f"{self.path}: line {number} is damaged, so what the run has cost is unknown; restore it "
                    "from a copy"
                ) from error

    def _append(
        self, number: int, word: str, sites: Iterable[str], entries: Sequence[Entry], once: str, same: str
    ) -> None:
        if not (names := sorted(sites)):
            return
        line: dict[str, Any] = {"round": number, word: names, "once": once, "same": same, "by": RELEASE}
        line["entries"] = [entry.to_json() for entry in entries]
        try:
            data = self.path.read_bytes() if self.path.exists() else b""
            with self.path.open("r+b" if data else "wb") as file:
                # what a crash left of a line goes away with the next one
                file.truncate(data.rfind(b"\n") + 1)
                file.seek(0, os.SEEK_END)
                file.write(json.dumps(line).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            flush_folder(self.path.parent)
        except OSError as error:
            raise StateError(
                f"{self.path}: could not be written ({error.strerror}); without it the cost of the round "
                "would go uncounted, so nothing is asked"
            ) from error


def _parse_entries(found: Any) -> tuple[Entry, ...]:
    return tuple(Entry.from_json(entry) for entry in found)


class _Line(BaseModel):
    """One line of releases.jsonl. asked, refused: sites; a line has one of them."""

    model_config = ConfigDict(strict=True)
    round: int
    asked: list[str] = []
    refused: list[str] = []
    once: str
    same: str
    by: str = ""
    entries: Annotated[tuple[Entry, ...], PlainValidator(_parse_entries)]

    @property
    def question(self) -> _Question:
        return (self.same, self.by, self.entries) if self.same else None
