"""Requests of people to a run in progress: to pause, or to stop.

A request is a small file beside the run folders. The run looks for it between rounds, and for a stop also
while it waits for sites. A pause lasts until the file is removed, whatever happens to processes and machines
in between: a run that is resumed with its request still there pauses again at once. Every round before a
pause is in a checkpoint, so a run that went on after one ends with the same bits.
"""

import json
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

from perennial.foundation.errors import ConfigError, StateError, clean_text
from perennial.foundation.files import make_folder, replace_file

CONTROL = ".control"
"""Folder beside the run folders: whoever may write a request need not be able to write a run."""
ALIVE = "alive"
"""A run folder's heartbeat, by which others know that a process works on it."""
POLL_SECONDS = 0.5
"""Seconds between two looks at a request."""

Request = Literal["pause", "stop"]


class RunStopped(StateError):
    """The run ended because the operator stopped it; it can be resumed."""


def request_path(run: Path) -> Path:
    """Path of the file in which people ask something of the run in folder `run`."""
    return run.parent / CONTROL / f"{run.name}.json"


def locate_heartbeat(runs: Path) -> Path:
    """Path of the heartbeat of the operator's pages for a folder of runs."""
    return runs / CONTROL / "pages.alive"


def split_key_path(run: Path) -> Path:
    """Path of the file with which an operator pins the key of the splits of the run in folder `run`."""
    return run.parent / CONTROL / f"{run.name}.split-key"


def read_split_key(run: Path) -> str:
    """The key that the operator pinned, or '' for one that is drawn. Raises ConfigError for another text."""
    path = split_key_path(run)
    return parse_split_key(path.read_text("utf-8", "replace"), str(path)) if path.exists() else ""


def parse_split_key(text: str, where: str) -> str:
    """The key that a text holds. Raises ConfigError, which begins with `where`, for any other text."""
    # it imports Flower, for which no other command of this module should wait
    from perennial.protocol.stamp import SPLIT_KEY

    key = text.strip()
    if not re.fullmatch(f"[0-9a-f]{{{SPLIT_KEY}}}", key):
        found = clean_text(repr(key), 80)
        raise ConfigError(f"{where}: found {found}, allowed {SPLIT_KEY} hexadecimal digits (0-9, a-f)")
    return key


def pin_split_key(run: Path, key: str) -> None:
    """Pin the key of a run that was never started; '': let it be drawn, whatever was pinned before."""
    if key:
        replace_file(split_key_path(run), f"{key}\n".encode(), mode=0o644)
    else:
        _remove(split_key_path(run))


def read_request(run: Path) -> Request | None:
    """What people ask of a run: pause or stop; None if nothing, or if the file cannot be read."""
    try:
        content = json.loads(request_path(run).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    request = content.get("request") if isinstance(content, dict) else None
    return cast(Request, request) if request in ("pause", "stop") else None


def write_request(run: Path, request: Request) -> None:
    """Ask something of a run. Raises StateError when there is no such run or it cannot be written."""
    if not run.is_dir():
        raise StateError(f"{run}: no such run")
    make_folder(request_path(run).parent)
    content = {"request": request, "time": datetime.now(UTC).isoformat(timespec="seconds")}
    # the run may be another user's than whoever asks
    replace_file(request_path(run), json.dumps(content).encode(), mode=0o644)


def clear_request(run: Path) -> None:
    """Withdraw the request. Raises StateError when the file cannot be removed."""
    _remove(request_path(run))


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StateError(f"{path}: cannot be removed: {error.strerror}") from error


class RunControl:
    """Obeys the requests for one run.

    write: of the journal, called when the run pauses and goes on. A request to stop that is there at the
    start was obeyed already, and is cleared.
    """

    def __init__(self, run: Path, write: Callable[..., None]) -> None:
        self._run = run
        self._write = write
        self._polled = 0.0
        if read_request(run) == "stop":
            clear_request(run)

    def wait_while_paused(self, meanwhile: Callable[[], None]) -> None:
        """Wait while a pause is asked for. meanwhile: called every POLL_SECONDS of it. Raises RunStopped."""
        self.while_waiting(at_once=True)
        if read_request(self._run) != "pause":
            return
        self._write("paused", reason="paused by the operator")
        while read_request(self._run) == "pause":
            meanwhile()
            time.sleep(POLL_SECONDS)
        self.while_waiting(at_once=True)
        self._write("went_on")

    def while_waiting(self, *, at_once: bool = False) -> None:
        """Look for a request to stop, not more often than every POLL_SECONDS seconds. Raises RunStopped."""
        now = time.monotonic()
        if not at_once and now - self._polled < POLL_SECONDS:
            return
        self._polled = now
        if read_request(self._run) == "stop":
            clear_request(self._run)
            self._write("stopped")
            raise RunStopped(
                f"{self._run.name}: stopped by the operator; every finished round is kept, and the run "
                "can be resumed"
            )


PAUSES = ("waiting", "waiting_for", "paused", "went_on", "stopped")
"""Events that pause_in_words puts into words."""


def pause_in_words(event: dict[str, Any]) -> str:
    """A sentence for an event that says that a run pauses, waits, or goes on."""
    missing = ", ".join(event.get("missing") or ())
    match event["event"]:
        case "waiting":
            there = ", ".join(event["connected"]) or "nobody"
            named = f"; not connected: {missing}" if missing else ""
            barred = "; ".join(f"{site}: {why}" for site, why in (event.get("refusing") or {}).items())
            no_part = f"; connected, and takes no part: {barred}" if barred else ""
            return f"waiting for {event['need']} sites; connected: {there}{named}{no_part}"
        case "waiting_for":
            return f"waiting for {describe_waiting(event['sites'])}"
        case "paused":
            named = f"; not connected: {missing}" if missing else ""
            return f"paused: {event['reason']}{named}"
        case "went_on":
            came = ", ".join(event.get("came") or ())
            return f"goes on: {came} came back" if came else "goes on"
    return "stopped by the operator; the run can be resumed"


def describe_waiting(sites: Mapping[str, int], shown: int = 5) -> str:
    """'linz (4 min), graz (2 min)': sites (site -> seconds) that a run waits for, the `shown` longest."""
    longest = sorted(sites.items(), key=lambda item: -item[1])
    words = [
        f"{site} ({f'{since} s' if since < 120 else f'{since // 60} min'})" for site, since in longest[:shown]
    ]
    more = f" and {len(sites) - shown} more" if len(sites) > shown else ""
    return ", ".join(words) + more
