"""The present state of one run, read from its journal and from the live status of the current round."""

import statistics
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from perennial.deploy.superlink import SuperLinkStatus, read_superlink_status
from perennial.foundation.heartbeat import is_alive, last_beat
from perennial.live.tail import (
    Tail,
    clean_numbers,
    clean_texts,
    clean_value,
    clean_whole,
    number,
    parse_seconds,
)
from perennial.server.control import ALIVE, pause_in_words
from perennial.server.journal import EVENTS, LIVE_STATUS

MOST_SITES = 100_000
"""Sites that a page knows of one run; a journal that names more is not one of ours."""
KEPT_NOTES = 200

Status = Literal["running", "paused", "waiting", "finished", "stopped", "silent", "ended"]
SiteStatus = Literal["refused", "failed", "silent", "offline", "training", "answered", "online", "unknown"]
SITE_ORDER: tuple[SiteStatus, ...] = get_args(SiteStatus)
"""Those that need attention first."""


@dataclass(frozen=True)
class RoundPoint:
    """One finished round. sites: number whose update is in the model. seconds: its duration."""

    round: int
    task: int
    sites: int
    skipped: bool
    accuracy: float | None
    seconds: float


@dataclass(frozen=True)
class TaskPoint:
    """One finished task. accuracy: of each task so far; classes: accuracy of each class so far.

    signs: why the model is taken to have learnt nothing; empty if it has learnt.
    """

    task: int
    accuracy: list[float | None]
    average: float | None
    classes: list[float | None]
    signs: list[str]


@dataclass
class SiteNow:
    """The state of one site. since: time of its status, in seconds since 1970; None if unknown."""

    name: str
    status: SiteStatus = "unknown"
    reason: str = ""
    since: float | None = None


@dataclass
class RunState:
    """The state of a run, read from its folder. Call read() to bring it up to date."""

    folder: Path
    engine: str = ""
    task: int = 0
    tasks: int = 0
    round: int = 0
    rounds_planned: int = 0
    deadline: float | None = None
    round_began: float | None = None
    ended_as: Literal["", "finished", "stopped"] = ""
    pause: str = ""
    """Why the run does not go on; '' while it does."""
    pause_kind: Literal["", "paused", "waiting"] = ""
    rests: bool = False
    """Whether a pause is the run's own, because too few sites answer."""
    rounds: list[RoundPoint] = field(default_factory=list)
    learnt: list[TaskPoint] = field(default_factory=list)
    class_names: list[str] = field(default_factory=list)
    notes: deque[tuple[float | None, str]] = field(default_factory=lambda: deque(maxlen=KEPT_NOTES))
    taken_part: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    marks: dict[str, str] = field(default_factory=dict)
    """Site -> how its sums differ from the others', in the newest round that compared them; '' if not."""
    last_faults: dict[str, tuple[str, bool, float | None]] = field(default_factory=dict)
    """Site -> (reason, whether it refused, when), of the newest round in which it was faulty and since."""
    absent: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    refusing: dict[str, str] = field(default_factory=dict)
    """Site -> why, of connected sites that take no part, or whose refusal lets the run rest."""
    rested_at: float = 0.0
    """When the journal last said who does not answer."""
    online: set[str] = field(default_factory=set)
    asked: dict[str, tuple[str, float]] = field(default_factory=dict)
    answered: dict[str, float] = field(default_factory=dict)
    alive: bool = False
    silent_for: float | None = None
    superlink: SuperLinkStatus | None = None
    """Of the SuperLink in whose folder the run lies; None for a simulation."""

    def __post_init__(self) -> None:
        self._journal, self._now = Tail(self.folder / EVENTS), Tail(self.folder / LIVE_STATUS)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def damaged(self) -> int:
        """Number of lines of the journal that could not be read."""
        return self._journal.damaged

    def read(self) -> None:
        """Read what was added to the run's files since the last call."""
        for event in self._journal.read():
            if self._journal.restarted:
                self._forget()
                self._journal.restarted = False
            self._take(event)
        for event in self._now.read():
            self._take_now(event)
        self.alive, self.silent_for = is_alive(self.folder / ALIVE), last_beat(self.folder / ALIVE)
        self.superlink = read_superlink_status(self.folder.parent)

    @property
    def status(self) -> Status:
        """The run's status, as its files and its heartbeat show it."""
        if self.ended_as:
            return self.ended_as
        if not self.alive:
            return "ended" if self.silent_for is None else "silent"
        return self.pause_kind or "running"

    @property
    def skipped(self) -> int:
        return sum(point.skipped for point in self.rounds)

    @property
    def waited_for(self) -> dict[str, float]:
        """Site -> time since which the run waits for its answer, in seconds since 1970."""
        return {
            site: since for site, (_, since) in self.asked.items() if self.answered.get(site, 0.0) < since
        }

    @property
    def seconds_left(self) -> float | None:
        """Expected seconds until the run ends, by the median of its last rounds; None before the second."""
        taken = [point.seconds for point in self.rounds[-10:] if not point.skipped]
        if len(taken) < 2 or self.rounds_planned < self.round:
            return None
        done = self.rounds[-1].round
        left = statistics.median(taken) * (self.rounds_planned - done)
        return max(0.0, left - (time.time() - self.round_began if self.round_began else 0.0))

    @property
    def accuracy(self) -> float | None:
        """The newest accuracy over all classes seen so far."""
        by_round = self.rounds[-1].accuracy if self.rounds else None
        return by_round if by_round is not None else (self.learnt[-1].average if self.learnt else None)

    def measure_forgetting(self) -> list[float | None]:
        """For each task but the newest, its best accuracy minus the newest; [] before the second task."""
        if len(self.learnt) < 2:
            return []
        newest = self.learnt[-1].accuracy
        found: list[float | None] = []
        for index in range(min(len(newest), len(self.learnt)) - 1):
            column = [point.accuracy[index] for point in self.learnt[:-1] if index < len(point.accuracy)]
            best = max((value for value in column if value is not None), default=None)
            last = newest[index]
            found.append(None if best is None or last is None else best - last)
        return found

    @property
    def mean_forgetting(self) -> float | None:
        """The mean over tasks, as summary.json has it; None where a task was not measured."""
        found = [value for value in self.measure_forgetting() if value is not None]
        return statistics.fmean(found) if found and len(found) == len(self.measure_forgetting()) else None

    @property
    def worst_forgetting(self) -> float | None:
        """Of the task that is forgotten most; None before the second task."""
        return max((lost for lost in self.measure_forgetting() if lost is not None), default=None)

    @property
    def silent(self) -> set[str]:
        """Sites of this run whose SuperNode the SuperLink no longer hears."""
        return {site for site in self.site_names() if self._silent_since(site) is not None}

    @property
    def offline(self) -> set[str]:
        """Sites of this run that were not connected when they were last counted."""
        known = self.site_names() - self.refusing.keys()
        return known - self.online if self.online and not self.is_over else set()

    def _silent_since(self, site: str) -> float | None:
        """Since when the SuperLink hears nothing of a site's SuperNode."""
        superlink = self.superlink
        return superlink.sites.get(site) if superlink is not None and superlink.alive else None

    def sites(self) -> list[SiteNow]:
        """The state of every known site, those that need attention first."""
        over = self.is_over
        found = [self.site(name, over) for name in self.site_names()]
        return sorted(found, key=lambda site: (SITE_ORDER.index(site.status), site.name))

    def site_names(self) -> set[str]:
        named = (self.taken_part, self.online, self.missing, self.asked, self.last_faults, self.absent)
        return set[str]().union(*named, self.refusing)

    @property
    def is_over(self) -> bool:
        """Whether no process works on the run."""
        return self.status in ("finished", "stopped", "ended", "silent")

    def site(self, name: str, over: bool) -> SiteNow:
        """The state of one site. over: whether no process works on the run."""
        fault = self.last_faults.get(name)
        if name in self.refusing and not over:
            return SiteNow(name, "refused", self.refusing[name], fault and fault[2])
        asked, since = self.asked.get(name), self._silent_since(name)
        if not over and asked is not None and self.answered.get(name, 0.0) < asked[1]:
            if since is not None or (name not in self.online and self.online):
                return SiteNow(name, "silent", "asked, and its connection is gone", since or asked[1])
            return SiteNow(name, "training", "", asked[1])
        if fault is not None:
            return SiteNow(name, "refused" if fault[1] else "failed", fault[0], fault[2])
        if not over and (name not in self.online or since is not None):
            return SiteNow(name, "offline", "not connected", since or None)
        if name in self.absent and name not in self.answered:
            return SiteNow(name, "silent", "did not answer in the last round")
        if name in self.answered:
            return SiteNow(name, "answered", "", self.answered[name])
        return SiteNow(name, "unknown" if over else "online")

    # one line of the journal

    def _forget(self) -> None:
        """The journal begins anew: nothing that it said before holds."""
        fresh = RunState(self.folder)
        kept = (self._journal, self._now)
        self.__dict__.update(fresh.__dict__)
        self._journal, self._now = kept

    def _take(self, event: dict[str, Any]) -> None:
        when = parse_seconds(event.get("time"))
        match event.get("event"):
            case "run_started" | "resumed":
                self.engine = clean_value(event.get("engine", ""), 20)
                self.ended_as, self.pause, self.pause_kind = "", "", ""
            case "sites":
                self.online |= set(clean_texts(event.get("connected")))
                self.missing, self.refusing = set(clean_texts(event.get("missing"))), {}
                self.pause, self.pause_kind = "", ""
            case "task_started":
                self.task = clean_whole(event.get("task"))
                self.class_names += [name for name in clean_texts(event.get("classes"))][:MOST_SITES]
            case "round":
                self._end_round(event, when)
            case "task_finished":
                self.learnt.append(
                    TaskPoint(
                        clean_whole(event.get("task")),
                        clean_numbers(event.get("accuracy")),
                        number(event.get("average_accuracy")),
                        clean_numbers(event.get("class_accuracy")),
                        clean_texts(event.get("stopped")),
                    )
                )
            case "note":
                self.notes.append((when, clean_value(event.get("text", ""))))
            case "run_finished" | "stopped" as kind:
                self.ended_as = "stopped" if kind == "stopped" else "finished"
                self.pause, self.pause_kind = "", ""
            case "paused" | "waiting" as kind:
                self.missing = set(clean_texts(event.get("missing")))
                self.rested_at = when or 0.0
                self.refusing, self.rests = _clean_reasons(event.get("refusing")), "missing" in event
                self.pause_kind, self.pause = kind, clean_value(pause_in_words(_pause(event, kind)))
                self.notes.append((when, self.pause))
            case "went_on":
                self.pause, self.pause_kind, self.refusing = "", "", {}
                self.notes.append((when, clean_value(pause_in_words(_pause(event, "went_on")))))

    def _end_round(self, event: dict[str, Any], when: float | None) -> None:
        self.round, self.task = clean_whole(event.get("round")), clean_whole(event.get("task"))
        participants = clean_texts(event.get("participants"))
        if len(self.taken_part) < MOST_SITES:
            self.taken_part.update(participants)
        while self.rounds and self.rounds[-1].round >= self.round:
            self.rounds.pop()
        self.rounds.append(
            RoundPoint(
                self.round,
                self.task,
                len(participants),
                event.get("skipped") is True,
                number(event.get("accuracy")),
                number(event.get("seconds")) or 0.0,
            )
        )
        faults = {}
        for kind in ("dropped", "refused"):
            entries = event.get(kind)
            for entry in entries if isinstance(entries, list) else ():
                if isinstance(entry, dict) and isinstance(entry.get("site"), str):
                    site = clean_value(entry["site"], 80)
                    self.refused[site] += kind == "refused"
                    faults[site] = (clean_value(entry.get("reason", "")), kind == "refused", when)
        if self.last_faults:
            there = set(participants)
            self.last_faults = {site: fault for site, fault in self.last_faults.items() if site not in there}
        self.last_faults |= faults
        self.absent = set(clean_texts(event.get("absent")))
        details = event.get("details")
        rows = details.get("cross_site") if isinstance(details, dict) else None
        if isinstance(rows, dict):
            self.marks = {
                clean_value(site, 80): clean_value(row.get("marked") or "") if isinstance(row, dict) else ""
                for site, row in list(rows.items())[:MOST_SITES]
            }
        self.pause, self.pause_kind = "", ""

    # one line about the round that goes on

    def _take_now(self, event: dict[str, Any]) -> None:
        when = number(event.get("time")) or time.time()
        match event.get("event"):
            case "round":
                self.asked, self.answered = {}, {}
                self.task, self.tasks = clean_whole(event.get("task")), clean_whole(event.get("tasks"))
                self.round, self.rounds_planned = (
                    clean_whole(event.get("round")),
                    clean_whole(event.get("rounds")),
                )
                self.deadline, self.round_began = number(event.get("deadline")), when
                self.online = set(clean_texts(event.get("online")))
                if when >= self.rested_at:  # else the journal knows more
                    self.missing = set(clean_texts(event.get("missing")))
                    self.refusing = _clean_reasons(event.get("refusing"))
            case "asked":
                kind = clean_value(event.get("kind", ""), 40)
                for site in clean_texts(event.get("sites"))[:MOST_SITES]:
                    self.asked[site] = (kind, when)
            case "answered" if isinstance(event.get("site"), str):
                site = clean_value(event["site"], 80)
                self.answered[site] = when
                if fault := clean_value(event.get("fault", "")):
                    self.last_faults[site] = (fault, event.get("refused") is True, when)
                else:
                    self.last_faults.pop(site, None)
            case "online":
                self.online |= set(clean_texts(event.get("came")))
                left = set(clean_texts(event.get("left")))
                self.online -= left
                self.missing = (self.missing | left) - self.online


def _pause(event: dict[str, Any], kind: str) -> dict[str, Any]:
    """The fields of a pause, each of the type that pause_in_words takes."""
    return {
        "event": kind,
        "need": clean_whole(event.get("need")),
        "connected": clean_texts(event.get("connected"))[:20],
        "missing": clean_texts(event.get("missing"))[:20],
        "came": clean_texts(event.get("came"))[:20],
        "reason": clean_value(event.get("reason", "")),
        "refusing": _clean_reasons(event.get("refusing")),
    }


def _clean_reasons(value: object) -> dict[str, str]:
    found = value.items() if isinstance(value, dict) else ()
    return {
        clean_value(site, 80): clean_value(why)
        for site, why in list(found)[:MOST_SITES]
        if isinstance(why, str)
    }
