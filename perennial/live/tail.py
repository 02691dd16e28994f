"""Reads files that other processes append to, line by line, as lines arrive.

The content is not trusted: a line that is too long, not JSON or not an object is left out and counted.
"""

import json
import os
import re
import stat
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

LONGEST_LINE = 32 * 2**20
"""Bytes of one line; a round of 5,000 sites with long names takes less than 1 MB."""
CHUNK = 4 * 2**20
LONGEST_NAME = 80
MOST = 100_000
"""Items of one list; a journal that has more is not one of ours."""
_REMEMBERED = 64
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class Tail:
    """Reads a file of JSON lines from its beginning, and on as lines are added.

    damaged: lines left out since the beginning. restarted: whether the last call of read() began anew,
    because another file is there now, or this one was cut.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0
        self.restarted = False
        self._descriptor = -1
        self._offset = 0
        self._rest = b""
        self._before = b""
        self._skipping = False

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the objects of all whole lines added since the last call; nothing if the file is missing."""
        self.restarted = False
        if not self._open():
            return
        while chunk := os.pread(self._descriptor, CHUNK, self._offset):
            self._offset += len(chunk)
            self._before = (self._before + chunk)[-_REMEMBERED:]
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                if self._skipping:
                    self._skipping = False
                elif (found := self._parse(line)) is not None:
                    yield found
            if len(self._rest) > LONGEST_LINE:
                self._rest, self._skipping = b"", True
                self.damaged += 1

    def close(self) -> None:
        """Close the file; the next read begins anew."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _open(self) -> bool:
        """Whether there is a file to read on; begins anew where it is not the one read before."""
        try:
            there = os.stat(self.path)
        except OSError:
            if self._descriptor >= 0:
                self.close()
                self._begin()
            return False
        if self._descriptor >= 0 and self._goes_on(there):
            return True
        self.close()
        try:
            # a pipe or a device in place of the file must not hold up whoever watches
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError:
            return False
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            self.close()
            return False
        self._begin()
        return True

    def _goes_on(self, there: os.stat_result) -> bool:
        ours = os.fstat(self._descriptor)
        if (ours.st_ino, ours.st_dev) != (there.st_ino, there.st_dev) or ours.st_size < self._offset:
            return False
        if ours.st_size == self._offset:
            return True
        # a resumed run cuts its journal and writes on: what stood before our place must still stand there
        return os.pread(self._descriptor, len(self._before), self._offset - len(self._before)) == self._before

    def _begin(self) -> None:
        self._offset, self._rest, self._before, self._skipping = 0, b"", b"", False
        self.damaged, self.restarted = 0, True

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        if not line.strip():
            return None
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            self.damaged += 1
            return None
        return found


def clean_value(value: object, longest: int = 400) -> str:
    """The value as text of at most `longest` characters, without control or direction-changing characters."""
    text = value if isinstance(value, str) else str(value)[:longest]
    if len(text) <= longest and text.isprintable():
        return text
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text[:longest]) + ("…" if len(text) > longest else "")


def number(value: object) -> float | None:
    """The value as a float if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if found - found == 0.0 else None


def clean_texts(value: object) -> list[str]:
    """The strings of a list, as plain text; [] for anything that is no list."""
    if not isinstance(value, list):
        return []
    try:
        # one look at all of them: a journal of a thousand rounds names millions
        if max(map(len, value), default=0) <= LONGEST_NAME and "".join(value).isprintable():
            return value
    except TypeError:
        pass
    return [clean_value(item, LONGEST_NAME) for item in value if isinstance(item, str)]


def clean_whole(value: object) -> int:
    """The value rounded down if it is a number from 0 on; else 0."""
    found = number(value)
    return int(found) if found is not None and 0 <= found < 2**53 else 0


def clean_numbers(value: object) -> list[float | None]:
    """The items of a list, with None for each that is no finite number; [] for no list."""
    return [number(item) for item in value[:MOST]] if isinstance(value, list) else []


def parse_seconds(value: object) -> float | None:
    """A journal's ISO time in seconds since 1970; None for anything else."""
    try:
        return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else None
    except (ValueError, OverflowError, OSError):
        return None
