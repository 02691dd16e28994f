"""events.jsonl and metrics.csv: what happened, one line each, readable while the run goes on.

A resumed run cuts the journal back to where its checkpoint stood, so that no round appears twice.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from perennial.foundation.errors import StateError
from perennial.foundation.files import flush_folder
from perennial.foundation.plain import read_object

EVENTS, LIVE_STATUS = "events.jsonl", "live.jsonl"
"""In a run folder: what happened, and what happens at this moment (server/live_status.py)."""


class Journal:
    """An append-only file of events.

    position: the file's length at the checkpoint. path: of the file.
    listener: called with every event, for the live display.

    A file that ends before position has lost lines, to a disk or to a copy: the journal then continues after
    the last whole line, and a note says so. Raises StateError wherever the file cannot be written.
    """

    def __init__(
        self, folder: Path, position: int = 0, listener: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        self.path = folder / EVENTS
        self._listener = listener or (lambda event: None)
        with self._name_failure():
            self.path.touch(mode=0o600)
            # unbuffered: a line that found no room is not tried again, and does not fail again, in close()
            self._file = open(self.path, "r+b", buffering=0)  # noqa: SIM115 - closed in close()
            there = os.fstat(self._file.fileno()).st_size
            kept = position if there >= position else self._file.readall().rfind(b"\n") + 1
            self._file.truncate(kept)
            self._file.seek(kept)
            flush_folder(folder)
        self._durable = 0
        if kept < position:
            self.write(
                "note",
                text=f"{EVENTS}: {position - kept} of its {position} bytes at the last checkpoint are lost; "
                "their rounds count in the model and the results, and are missing here and in metrics.csv",
            )

    def measure_length(self) -> int:
        """Length of the file in bytes."""
        return self._file.tell()

    def flush_to_disk(self) -> int:
        """Flush the file to the disk; returns its length in bytes, for a checkpoint to remember."""
        position = self.measure_length()
        if self._durable != position:
            with self._name_failure():
                os.fsync(self._file.fileno())
            self._durable = position
        return position

    def write(self, event: str, **facts: Any) -> None:
        """Append one event, with the time in UTC."""
        entry = {"event": event, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), **facts}
        with self._name_failure():
            self._append(json.dumps(entry).encode() + b"\n")
        self._listener(entry)

    def note(self, text: str) -> None:
        """Append a remark in words."""
        self.write("note", text=text)

    def tell(self, event: str, **facts: Any) -> None:
        """Pass an event to the listener, without writing it."""
        self._listener({"event": event, **facts})

    def close(self) -> None:
        self._file.close()

    def _append(self, line: bytes) -> None:
        """All of line, or nothing of it."""
        start, rest = self._file.tell(), memoryview(line)
        try:
            while rest:
                # a disk with little room takes a part, and says so only to the next attempt
                rest = rest[self._file.write(rest) :]
        except OSError:
            with suppress(OSError):
                self._file.truncate(start)
                self._file.seek(start)
            raise

    @contextmanager
    def _name_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StateError(
                f"{self.path}: could not be written: {error.strerror}; resume when there is room"
            ) from error


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Read all events of a run, without a last line that a kill cut short. Raises StateError if damaged."""
    path = folder / EVENTS
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {error.strerror}") from error
    events = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            event = read_object(line)
            if not isinstance(event.get("event"), str):
                raise ValueError(f"event: found {event.get('event')!r:.60}, allowed the name of one")
            events.append(event)
        except ValueError as error:
            raise StateError(f"{path}: line {number} is damaged: {error}") from error
    return events
