"""How often each site was asked for a protected update: what the run may have cost it, never too little.

A line is on the disk before the round's requests leave. A round that is repeated after a crash is asked, and
counted, again: its first releases may have been seen. A site that refused released nothing, and is taken off.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from foundation.errors import StateError
from foundation.files import flush_folder


class Releases:
    """releases.jsonl in a run folder: append-only, flushed line by line."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "releases.jsonl"

    def asked(self, number: int, sites: Iterable[str]) -> None:
        """Sites about to be asked in a round. Raises StateError when that cannot be recorded."""
        self._append({"round": number, "asked": sorted(sites)})

    def refused(self, number: int, sites: Iterable[str]) -> None:
        """Sites that said no, and so sent nothing."""
        if names := sorted(sites):
            self._append({"round": number, "refused": names})

    def counts(self) -> dict[str, int]:
        """site -> releases that it may have made. Raises StateError naming a line that cannot be read."""
        counts: Counter[str] = Counter()
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else []
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line) if line else {}
                counts.update(entry.get("asked", []))
                counts.subtract(entry.get("refused", []))
            except (ValueError, AttributeError, TypeError) as error:
                if number == len(lines):
                    break  # cut short by a crash: its round was never asked
                raise StateError(
                    f"{self.path}: line {number} is damaged, so what the run has cost is unknown; restore it "
                    "from a copy"
                ) from error
        return dict(counts)

    def repeated(self, rounds: int) -> bool:
        """Whether more rounds were asked than the `rounds` that the run is made of."""
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        return sum(b'"asked"' in line for line in lines) > rounds

    def _append(self, entry: dict[str, Any]) -> None:
        try:
            data = self.path.read_bytes() if self.path.exists() else b""
            with self.path.open("r+b" if data else "wb") as file:
                # what a crash left of a line goes away with the next one
                file.truncate(data.rfind(b"\n") + 1)
                file.seek(0, os.SEEK_END)
                file.write(json.dumps(entry).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            flush_folder(self.path.parent)
        except OSError as error:
            raise StateError(
                f"{self.path}: could not be written ({error.strerror}); without it the cost of the round "
                "would go uncounted, so nothing is asked"
            ) from error
