"""The present state of a hospital's own site: ledger, requests, approvals, offers, connection."""

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from perennial.client.activity import ACTIVITY
from perennial.client.consent import Consent, read_consent
from perennial.config.approval import Approval, read_approvals
from perennial.config.site import load_site_config
from perennial.deploy.certificates import read_node_key
from perennial.deploy.handshake import Unreachable, check_admission
from perennial.deploy.supernode import ALIVE, ANSWERED, require_free_port, try_check
from perennial.foundation.errors import PerennialError
from perennial.foundation.files import measure_size
from perennial.foundation.heartbeat import is_alive, last_beat
from perennial.live.tail import Tail, clean_value, number

KEPT = 500
"""Newest requests that the page knows."""
ASK_AGAIN = 30.0
"""Seconds between two questions why the SuperLink does not answer, and between two counts of the ledger."""
ANSWERED_WITHIN = 20.0
"""Seconds within which the SuperLink has answered a SuperNode that is connected, which asks every few."""
DAY = 86_400.0
STALE = 6 * 3600.0
"""Seconds after which a request without an end counts as cut off: its process was killed."""


@dataclass
class Asked:
    """A request to the site. ended: '' while it is being answered, else answered, refused or failed."""

    kind: str
    run: str
    name: str
    round: int
    began: float
    ended: str = ""
    reason: str = ""
    until: float | None = None


class Released(NamedTuple):
    """One line of the ledger."""

    time: str
    run: str
    experiment: str
    kind: str
    unit: str
    words: str


@dataclass(frozen=True)
class KeptRun:
    """What a site stores of one run. newest: when that last changed, in seconds since 1970."""

    run: str
    bytes: int
    newest: float


class HospitalState:
    """The state of one site, read from its files. Call read() to bring it up to date."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.config = load_site_config(self.path)
        self.asked: deque[Asked] = deque(maxlen=KEPT)
        self.names: dict[str, str] = {}
        self.releases: list[Released] = []
        self.approvals: list[Approval] = []
        self.offered: list[Path] = []
        self.kept: list[KeptRun] = []
        self.consent = Consent("", {})
        self.problems: list[str] = []
        self.ledger_problem = ""
        self.unapproved = ""
        """SHA-256 of the app that was sent last of those that were not approved, within STALE."""
        self.port_taken = False
        """Whether the SuperNode does not run, and another program has a port of its."""
        self.alive = False
        self.answered: float | None = None
        """Seconds since the SuperLink last answered this site's SuperNode; None: it never did."""
        self.obstacle = ""
        """Why it does not answer, as far as this machine can tell; '' while it does."""
        self.unreachable = False
        """Whether that is because nothing gets through."""
        self.epsilon: float | None = None
        self._by_request: dict[str, Asked] = {}
        self._counted = self._asked_why = -ASK_AGAIN
        folder = self.config.state_dir
        self._activity, self._ledger = Tail(folder / ACTIVITY), Tail(folder / "ledger.jsonl")

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def limit(self) -> float | None:
        """The most epsilon that the site may spend in its lifetime; None if its policy sets no limit."""
        return self.config.policy.max_epsilon

    @property
    def now(self) -> Asked | None:
        """The request that is being answered, or None."""
        recent = (one for one in reversed(self.asked) if not one.ended and time.time() - one.began < STALE)
        return next(recent, None)

    def name_of(self, release: Released) -> str:
        """The name of a release's run, as far as it is known here."""
        return self.names.get(release.run) or self.names.get(release.experiment) or release.run[:12]

    @property
    def last(self) -> Asked | None:
        """The latest request that has ended."""
        return next((one for one in reversed(self.asked) if one.ended), None)

    @property
    def connected(self) -> bool:
        """Whether the SuperNode runs and the SuperLink has just answered a request signed with its key."""
        return self.alive and self.answered is not None and self.answered < ANSWERED_WITHIN

    def list_newest(self) -> list[Asked]:
        """The latest finished request of each kind and run that came within the last day."""
        recent = (one for one in self.asked if one.ended and time.time() - one.began < DAY)
        return list({(one.run, one.kind): one for one in recent}.values())

    def read(self) -> None:
        """Read what was added to the site's files since the last call."""
        changed = False
        for event in self._activity.read():
            self._take(event)
            changed = True
        for line in self._ledger.read():
            if self._ledger.restarted:
                self.releases.clear()
                self._ledger.restarted = False
            self._take_release(line)
            changed = True
        if changed or time.monotonic() - self._counted > ASK_AGAIN:
            self._counted = time.monotonic()
            self._look_around()
        self.alive = is_alive(self.config.state_dir / ALIVE)
        self.answered = last_beat(self.config.state_dir / ANSWERED)
        self._look_for_obstacles()

    def _look_around(self) -> None:
        """What changes by people, not by requests."""
        self.problems = []
        with self._note_problem():
            self.config = load_site_config(self.path)
        with self._note_problem():
            self.consent = read_consent(self.config.state_dir)
        with self._note_problem():
            approvals = read_approvals(self.config.approvals)
            self.names |= {one.experiment: str(one.settings.get("name", "")) for one in approvals}
            self.approvals = approvals
        approved = {approval.bundle[:8] for approval in self.approvals}
        offers = sorted((self.folder / "offered").glob("*.fab"))
        self.offered = [path for path in offers if path.name.split(".")[-2] not in approved]
        found = map(_measure_run, (self.config.state_dir / "runs").glob("*"))
        self.kept = sorted((kept for kept in found if kept is not None), key=lambda kept: -kept.newest)
        self._count()

    @contextmanager
    def _note_problem(self) -> Iterator[None]:
        """A block whose error is one of the problems shown, and ends nothing else."""
        try:
            yield
        except PerennialError as error:
            self.problems.append(clean_value(str(error)))

    def _count(self) -> None:
        """The ledger's own figure, checked as for a release."""
        policy = self.config.policy
        ledger, self.ledger_problem = self.config.ledger, ""
        try:
            self.epsilon = ledger.cost(policy.delta, "rdp", policy.unit).epsilon if ledger.started else 0.0
        except PerennialError as error:
            self.epsilon = None
            self.ledger_problem = clean_value(f"ledger: {error}")

    def _look_for_obstacles(self) -> None:
        """Ask as the SuperNode does while it gets no answer, not more often than every ASK_AGAIN seconds."""
        connection = self.config.connection
        if connection is None or self.connected:
            self.obstacle, self.port_taken, self._asked_why = "", False, -ASK_AGAIN
            return
        if time.monotonic() - self._asked_why < ASK_AGAIN:
            return
        self._asked_why = time.monotonic()
        self.port_taken = not self.alive and not try_check(require_free_port, connection)
        authority = self.folder / connection.ca
        try:
            key = read_node_key(self.folder / connection.key)
            check_admission(connection.superlink, authority, key, connected=self.alive)
            self.obstacle = ""
        except PerennialError as error:
            self.obstacle, self.unreachable = clean_value(str(error)), isinstance(error, Unreachable)

    def _take(self, event: dict[str, Any]) -> None:
        request, when = str(event.get("request", ""))[:80], number(event.get("time")) or time.time()
        if event.get("event") == "not_approved" and time.time() - when < STALE:
            self.unapproved = clean_value(event.get("app", ""), 64)
        if event.get("event") == "asked":
            one = Asked(
                clean_value(event.get("kind", ""), 40),
                clean_value(event.get("run", ""), 64),
                clean_value(event.get("name", ""), 80),
                int(number(event.get("round")) or 0),
                when,
            )
            if one.run and one.name:
                self.names[one.run] = one.name
            self.asked.append(one)
            self._by_request = {key: found for key, found in self._by_request.items() if not found.ended}
            self._by_request[request] = one
        elif (one := self._by_request.get(request)) is not None:
            one.ended, one.until = clean_value(event.get("event", ""), 20), when
            one.reason = clean_value(event.get("reason", ""))

    def _take_release(self, line: dict[str, Any]) -> None:
        if "kind" not in line:
            return
        self.releases.append(
            Released(
                clean_value(line.get("time", ""), 30),
                clean_value(line.get("run", ""), 64),
                clean_value(line.get("experiment", ""), 64),
                clean_value(line.get("kind", ""), 40),
                clean_value(line.get("unit", ""), 20),
                describe_protection(line),
            )
        )


def _measure_run(folder: Path) -> KeptRun | None:
    """What is stored in a run's folder; None where it has just been removed, or cannot be read."""
    try:
        if folder.is_symlink() or not folder.is_dir():
            return None
        return KeptRun(folder.name, measure_size(folder), folder.stat().st_mtime)
    except OSError:
        return None


def describe_protection(line: dict[str, Any]) -> str:
    """In words, what protected the release that a line of the ledger records."""
    multiplier, rate, steps = (number(line.get(key)) for key in ("noise_multiplier", "sample_rate", "steps"))
    match line.get("mechanism"):
        case "unprotected":
            return "nothing: it left in the clear"
        case "stated":
            epsilon = number(line.get("epsilon"))
            return f"epsilon {epsilon:.3g} by its own proof" if epsilon is not None else "its own proof"
        case "gaussian" | "discrete_gaussian":
            who = "noise of the server" if line.get("trusts_server") is True else "noise"
            words = f"{who} {multiplier:.3g}" if multiplier is not None else who
            if rate is not None and rate < 1 and steps is not None:
                words += f", {steps:.0f} steps on a share of {rate:.3g}"
            return words
    return clean_value(line.get("mechanism", ""), 40)


def describe_left(spent: float | None, limit: float | None) -> tuple[str, float]:
    """(words such as '6.8 of 8; 1.2 left', share of the budget spent); spent None: it is not known."""
    if spent is None:
        return "unknown: the ledger cannot be read", 1.0
    shown = "∞" if math.isinf(spent) else f"{spent:.3g}"
    if limit is None:
        return f"{shown}, and no budget is set", 0.0
    left = max(0.0, limit - spent)
    return f"{shown} of {limit:g}; {left:.3g} left", min(1.0, spent / limit)
