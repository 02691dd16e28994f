"""events.jsonl and metrics.csv: what happened, one line each, readable while the run goes on.

A resumed run cuts the journal back to where its checkpoint stood, so that no round appears twice.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foundation.errors import StateError

EVENTS = "events.jsonl"


class Journal:
    """Append-only. listener: called with every event, for the live display."""

    def __init__(
        self, folder: Path, position: int = 0, listener: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        self._path = folder / EVENTS
        self._listener = listener or (lambda event: None)
        try:
            self._path.touch(mode=0o600)
            self._file = open(self._path, "r+b")  # noqa: SIM115 - closed in close(), it lives as long as the run
            self._file.truncate(position)
            self._file.seek(position)
        except OSError as error:
            raise StateError(f"{self._path}: cannot be written: {error.strerror}") from error

    @property
    def position(self) -> int:
        """Bytes written: what a checkpoint remembers."""
        return self._file.tell()

    def write(self, event: str, **facts: Any) -> None:
        """Append one event, with the time in UTC."""
        entry = {"event": event, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), **facts}
        try:
            self._file.write(json.dumps(entry).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise StateError(
                f"{self._path}: could not be written: {error.strerror}; resume when there is room"
            ) from error
        self._listener(entry)

    def close(self) -> None:
        self._file.close()


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The events of a run; a last line that a kill cut short is left out."""
    path = folder / EVENTS
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {error.strerror}") from error
    events = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            events.append(json.loads(line))
        except ValueError as error:
            raise StateError(f"{path}: line {number} is damaged: {error}") from error
    return events
