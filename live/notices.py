"""Notices to a person when a run needs somebody: one webhook call for each cause.

A notice goes out when a run finishes, stalls, or ends early, when a site refuses, and when a budget is nearly
spent; once while the cause lasts. The address may hold a secret, so it is read from a file and never shown.
"""

import json
import logging
import queue
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from perennial.deploy.superlink_status import SuperLinkStatus
from perennial.foundation.errors import ConfigError
from perennial.live.run_state import RunState
from perennial.live.spending import Spending
from perennial.live.warnings import site_warnings, superlink_warnings, warnings_of

log = logging.getLogger("perennial.live")
SENT = ("silent", "ended", "refused", "pause", "late", "disk", "offline")
"""Kinds of warnings that go out; the others wait until somebody looks."""
SUPERLINK = "the SuperLink"
"""In place of a run's name, which has no space."""
ATTEMPTS, SECONDS = 3, 10.0
NEARLY = 0.8
"""Share of a budget that is spent when it counts as nearly spent."""
WAITING = 1000
"""Notices that wait to be sent; more are dropped, and the log says so."""

Send = Callable[[dict[str, Any]], None]


def read_address(path: Path) -> str:
    """The webhook's address in a file. Raises ConfigError when it is none."""
    try:
        address = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the webhook's address cannot be read ({error})") from error
    if urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).netloc:
        raise ConfigError(f"{path}: allowed one address that begins with https:// or http://")
    return address


class Notices:
    """Who was told what. send: gives one notice to the outside, in a thread of its own.

    budget: epsilon of one site in one run of which people are told when NEARLY of it is spent; None: none.
    """

    def __init__(self, send: Send, budget: float | None = None) -> None:
        self._send = send
        self._budget = budget
        self._sent: dict[str, set[str]] = {}
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue(WAITING)
        threading.Thread(target=self._deliver, name="notices", daemon=True).start()

    def take(self, state: RunState, spending: Spending) -> None:
        """Look at a run, and send a notice of every cause that has begun since the last look."""
        found = {
            f"{warned.kind}: {warned.text}" if warned.kind == "refused" else warned.kind: warned.text
            for warned in warnings_of(state)
            if warned.kind in SENT
        }
        if state.status == "finished":
            found["finished"] = "The run is finished."
        if self._budget is not None:
            for site, epsilon in spending.by_site.items():
                if epsilon >= NEARLY * self._budget:
                    found[f"budget of {site}"] = (
                        f"{site} has spent up to epsilon {epsilon:.3g} of {self._budget:g} in this run."
                    )
        if state.name not in self._sent and state.status == "finished":
            self._sent[state.name] = set(found)  # it was over before anybody watched
        self._tell(state.name, found)

    def take_superlink(self, superlink: SuperLinkStatus) -> None:
        """The same for the SuperLink, whatever the runs do."""
        found = {warned.kind: warned.text for warned in superlink_warnings(superlink)}
        found |= {f"offline: {warned.text}": warned.text for warned in site_warnings(superlink)}
        self._tell(SUPERLINK, found)

    def _tell(self, name: str, found: dict[str, str]) -> None:
        """Send what has begun. found: text by cause."""
        before = self._sent.get(name, set())
        self._sent[name] = set(found)
        for key in found.keys() - before:
            self._put({"run": name, "kind": key.split(":")[0], "text": found[key], "time": time.time()})

    def _put(self, notice: dict[str, Any]) -> None:
        try:
            self._queue.put_nowait(notice)
        except queue.Full:
            log.error("a notice was dropped, because %d wait to be sent", WAITING)

    def _deliver(self) -> None:
        while True:
            notice = self._queue.get()
            for attempt in range(ATTEMPTS):
                try:
                    self._send(notice)
                    break
                except OSError as error:
                    # the error's own text may hold the address
                    log.warning("a notice was not taken (%s)", type(error).__name__)
                    time.sleep(2.0**attempt)


def webhook(address: str) -> Send:
    """Sends a notice as JSON. `text` is the key that Slack, Mattermost and their like show."""

    def send(notice: dict[str, Any]) -> None:
        body = json.dumps({**notice, "text": f"{notice['run']}: {notice['text']}"}).encode()
        request = urllib.request.Request(address, body, {"content-type": "application/json"}, method="POST")
        with urllib.request.urlopen(request, timeout=SECONDS):
            pass

    return send
