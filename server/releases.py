"""What each site was asked to release under protection: an upper bound on the privacy cost of a run.

A line is on the disk before the requests leave. A round that is repeated after a crash is asked, and counted,
again: its first releases may have been seen. A site that refused released nothing, and is taken off.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from perennial.foundation.errors import PrivacyError, StateError
from perennial.foundation.files import flush_folder
from perennial.privacy.entries import Entry

UPDATE = "update"


class Releases:
    """releases.jsonl in a run folder: append-only, flushed line by line.

    once: names a release that a site makes once, and sends again when it is asked again; '': each is new.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "releases.jsonl"

    def asked(self, number: int, sites: Iterable[str], entries: Sequence[Entry], once: str = "") -> None:
        """Sites about to be asked, in a round, for what they charge as these entries.

        Raises StateError when that cannot be recorded.
        """
        self._append(number, "asked", sites, entries, once)

    def refused(self, number: int, sites: Iterable[str], entries: Sequence[Entry], once: str = "") -> None:
        """Take off sites that refused, and so sent nothing."""
        self._append(number, "refused", sites, entries, once)

    def charged(self) -> dict[str, list[Entry]]:
        """The entries that each site which was asked may have charged in this run, by site.

        Raises StateError naming a line that cannot be read.
        """
        times: dict[str, Counter[tuple[str, tuple[Entry, ...]]]] = {}
        for line in self._lines():
            release = line["once"], tuple(Entry.from_json(entry) for entry in line["entries"])
            for word, count in (("asked", 1), ("refused", -1)):
                for site in line.get(word, ()):
                    times.setdefault(site, Counter())[release] += count
        return {
            site: [
                entry
                for (once, entries), count in found.items()
                for entry in entries * (min(count, 1) if once else count)
            ]
            for site, found in times.items()
        }

    def repeated(self, rounds: int) -> bool:
        """Whether updates were asked for more often than in the `rounds` that the run is made of."""
        kinds = ({entry["kind"] for entry in line["entries"]} for line in self._lines() if "asked" in line)
        return sum(UPDATE in kind for kind in kinds) > rounds

    def _lines(self) -> Iterator[dict[str, Any]]:
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else []
        for number, line in enumerate(lines, start=1):
            try:
                if line:
                    yield _checked(json.loads(line))
            except (ValueError, RecursionError, PrivacyError) as error:
                if number == len(lines):
                    return  # cut short by a crash: nobody was asked
                raise StateError(
                    f"{self.path}: line {number} is damaged, so what the run has cost is unknown; restore it "
                    "from a copy"
                ) from error

    def _append(
        self, number: int, word: str, sites: Iterable[str], entries: Sequence[Entry], once: str
    ) -> None:
        if not (names := sorted(sites)):
            return
        line = {"round": number, word: names, "once": once, "entries": [entry.to_json() for entry in entries]}
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


def _checked(line: Any) -> dict[str, Any]:
    """Raises ValueError or PrivacyError on a line that is none of ours."""
    names = [*line.get("asked", ()), *line.get("refused", ())] if isinstance(line, dict) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise ValueError("no line of releases")
    if not isinstance(line.get("once"), str) or not isinstance(line.get("entries"), list):
        raise ValueError("no line of releases")
    for entry in line["entries"]:
        Entry.from_json(entry)
    return line
