"""Notices to a person when a run is finished or a fault begins, once for each fault while it stands.

They go to a webhook, whose address may hold a secret and so is read from a file, or by e-mail (live/mail.py).
"""

import json
import logging
import queue
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from perennial.foundation.errors import ConfigError
from perennial.server.faults import Fault, grouped

log = logging.getLogger("perennial.live")
FEDERATION = "the federation"
"""In place of a run's name, which has no space."""
ATTEMPTS, SECONDS = 3, 10.0
WAITING = 1000
"""Notices that wait to be sent; more are dropped, and the log says so."""

Send = Callable[[dict[str, Any]], None]


def read_address(path: Path) -> str:
    """Read the webhook's address from a file. Raises ConfigError when it holds none."""
    try:
        address = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the webhook's address cannot be read ({error})") from error
    if urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).netloc:
        raise ConfigError(f"{path}: allowed one address that begins with https:// or http://")
    return address


class Notices:
    """Sends each notice once. sends: functions that deliver a notice, each in a thread of its own."""

    def __init__(self, sends: Sequence[Send]) -> None:
        self._told: dict[str, set[Fault]] = {}
        self._finished: set[str] = set()
        self._queues: list[queue.Queue[dict[str, Any]]] = []
        for send in sends:
            waiting: queue.Queue[dict[str, Any]] = queue.Queue(WAITING)
            self._queues.append(waiting)
            threading.Thread(target=_deliver, args=(send, waiting), name="notices", daemon=True).start()

    def take(self, name: str, faults: Iterable[Fault], *, finished: bool = False) -> None:
        """Send a notice for every fault that is new since the last call, and for a run that has finished.

        name: of the run or the site. faults: all that are present now.
        """
        found = set(faults)
        before = self._told.get(name)
        self._told[name] = found
        if finished and name not in self._finished:
            self._finished.add(name)
            if before is None:
                return  # it was over before anybody watched
            done = {"kind": "finished", "text": "The run is finished.", "remedy": ""}
            self._put({"run": name, **done, "time": time.time()})
        for fault in grouped(found - (before or set())):
            said = {**fault.facts(), "run": name, "text": fault.said, "remedy": fault.turn}
            self._put({**said, "time": time.time()})

    def _put(self, notice: dict[str, Any]) -> None:
        for waiting in self._queues:
            try:
                waiting.put_nowait(notice)
            except queue.Full:
                log.error("a notice was dropped, because %d wait to be sent", WAITING)


def _deliver(send: Send, waiting: "queue.Queue[dict[str, Any]]") -> None:
    while True:
        notice = waiting.get()
        for attempt in range(ATTEMPTS):
            try:
                send(notice)
                break
            except OSError as error:
                # the error's own text may hold the address
                log.warning("a notice was not taken (%s)", type(error).__name__)
                time.sleep(2.0**attempt)


def webhook(address: str) -> Send:
    """A function that posts a notice as JSON, with its text under the key that chat services show."""

    def send(notice: dict[str, Any]) -> None:
        text = f"{notice['run']}: {notice['text']} {notice['remedy']}".rstrip()
        body = json.dumps({**notice, "text": text}).encode()
        request = urllib.request.Request(address, body, {"content-type": "application/json"}, method="POST")
        with urllib.request.urlopen(request, timeout=SECONDS):
            pass

    return send
