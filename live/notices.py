"""Notices to a person when a run or a site needs somebody, once for each cause while it lasts.

A notice goes out when a run finishes, stalls, or ends early, when a site refuses or fails, and when a budget
is nearly spent: to a webhook, whose address may hold a secret and so is read from a file, or by e-mail
(live/mail.py).
"""

import json
import logging
import queue
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from perennial.deploy.superlink_status import SuperLinkStatus
from perennial.foundation.errors import ConfigError
from perennial.live.run_state import RunState
from perennial.live.spending import Spending
from perennial.live.warnings import Warned, site_warnings, superlink_warnings, warnings_of

log = logging.getLogger("perennial.live")
SENT = ("silent", "ended", "refused", "failed", "pause", "late", "disk", "offline")
SENT_AT_SITE = ("problem", "supernode", "superlink", "budget", "offer")
"""The same for a hospital."""
BY_TEXT = ("refused", "failed", "offline", "problem", "offer")
"""Kinds of which each text is a cause of its own; of the others a figure in the text may grow."""
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


@dataclass(frozen=True)
class Cause:
    """Why somebody is told. kind: a word for programs. remedy: what to do, or ''."""

    kind: str
    text: str
    remedy: str = ""


class Notices:
    """Who was told what. sends: each gives one notice to the outside, in a thread of its own.

    budget: epsilon of one site in one run of which people are told when NEARLY of it is spent; None: none.
    """

    def __init__(self, sends: Sequence[Send], budget: float | None = None) -> None:
        self._budget = budget
        self._sent: dict[str, set[str]] = {}
        self._queues: list[queue.Queue[dict[str, Any]]] = []
        for send in sends:
            waiting: queue.Queue[dict[str, Any]] = queue.Queue(WAITING)
            self._queues.append(waiting)
            threading.Thread(target=_deliver, args=(send, waiting), name="notices", daemon=True).start()

    def take(self, state: RunState, spending: Spending) -> None:
        """Look at a run, and send a notice of every cause that has begun since the last look."""
        found = {_key(warned): _cause(warned) for warned in warnings_of(state) if warned.kind in SENT}
        if state.status == "finished":
            found["finished"] = Cause("finished", "The run is finished.")
        if self._budget is not None:
            for site, epsilon in spending.by_site.items():
                if epsilon >= NEARLY * self._budget:
                    found[f"budget of {site}"] = Cause(
                        "budget",
                        f"{site} has spent up to epsilon {epsilon:.3g} of {self._budget:g} in this run.",
                        "A site refuses when its own lifetime budget is spent; its page says what is left.",
                    )
        if state.name not in self._sent and state.status == "finished":
            self._sent[state.name] = set(found)  # it was over before anybody watched
        self._tell(state.name, found)

    def take_superlink(self, superlink: SuperLinkStatus) -> None:
        """The same for the SuperLink, whatever the runs do."""
        warnings = (*superlink_warnings(superlink), *site_warnings(superlink))
        self._tell(SUPERLINK, {_key(warned): _cause(warned) for warned in warnings})

    def take_site(self, name: str, warnings: Iterable[Warned]) -> None:
        """The same for a hospital's own site. warnings: every one that there is now."""
        kept = [warned for warned in warnings if warned.kind in SENT_AT_SITE]
        self._tell(name, {_key(warned): _cause(warned) for warned in kept})

    def _tell(self, name: str, found: Mapping[str, Cause]) -> None:
        """Send what has begun. found: every cause that there is now, by a key that stays while it lasts."""
        before = self._sent.get(name, set())
        self._sent[name] = set(found)
        for key in found.keys() - before:
            self._put({"run": name, **asdict(found[key]), "time": time.time()})

    def _put(self, notice: dict[str, Any]) -> None:
        for waiting in self._queues:
            try:
                waiting.put_nowait(notice)
            except queue.Full:
                log.error("a notice was dropped, because %d wait to be sent", WAITING)


def _key(warned: Warned) -> str:
    """The same while the cause lasts."""
    return f"{warned.kind}: {warned.text}" if warned.kind in BY_TEXT else warned.kind


def _cause(warned: Warned) -> Cause:
    return Cause(warned.kind, warned.text, warned.remedy)


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
    """Sends a notice as JSON. `text` is the key that Slack, Mattermost and their like show."""

    def send(notice: dict[str, Any]) -> None:
        text = f"{notice['run']}: {notice['text']} {notice['remedy']}".rstrip()
        body = json.dumps({**notice, "text": text}).encode()
        request = urllib.request.Request(address, body, {"content-type": "application/json"}, method="POST")
        with urllib.request.urlopen(request, timeout=SECONDS):
            pass

    return send
