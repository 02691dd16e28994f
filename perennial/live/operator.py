"""The operator's pages: every run of one folder."""

import asyncio
import json
import math
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, get_args

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from perennial.config.experiment import load_experiment
from perennial.deploy.superlink import read_superlink_status
from perennial.foundation.errors import PerennialError
from perennial.foundation.heartbeat import is_alive, keep_beating
from perennial.live.diagnosis import find_faults
from perennial.live.metrics import answer, list_run_metrics, list_superlink_metrics, write_metrics
from perennial.live.run_state import SITE_ORDER, RunState, Status
from perennial.live.tail import number
from perennial.live.web import format_duration, make_app, render
from perennial.privacy.composition import compose
from perennial.privacy.entries import Entry
from perennial.server.charts.curves import Curve, Curves, Span
from perennial.server.charts.frame import Axis
from perennial.server.control import ALIVE, locate_heartbeat
from perennial.server.faults import Fault
from perennial.server.journal import EVENTS
from perennial.server.releases import Releases
from perennial.server.report.markup import duration, format_count, format_decimal, format_percent

MOST_RUNS, MOST_WATCHED = 500, 64
RECENT, DAY = 20, 86_400.0
"""Newest runs of which those that were finished within so many seconds are still watched."""
LARGEST_SUMMARY = 64 * 2**20
SITES_SHOWN = 100
LOOK = 2.0
"""Seconds between two looks at unfinished runs, so that their pages are there at once."""
STATUS_WORDS = {status: status for status in get_args(Status)}
STATUS_WORDS |= {"waiting": "waiting for sites", "silent": "no sign of life", "ended": "ended early"}
SITE_WORDS = {status: status for status in SITE_ORDER} | {"training": "working", "unknown": "took part"}
REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "frame-ancestors 'none'; sandbox allow-scripts"
)
"""A report is one self-contained page: it loads nothing, and is of no origin, so that it reaches no form."""


class Spending:
    """Epsilon spent by each site of a run, from the folder's record of releases.

    unit, delta: of the figures. by_site: epsilon, infinite if something left without protection; empty if
    nothing is protected, or if the record cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.unit, self.delta = "", 0.0
        self.by_site: dict[str, float] = {}
        self._folder, self._releases = folder, Releases(folder)
        self._size = 0
        self._known: dict[frozenset[tuple[Entry, int]], float] = {}

    def read(self) -> None:
        """Count again if something was released since the last call."""
        try:
            size = self._releases.path.stat().st_size
            if size == self._size:
                return
            self._size = size
            privacy = load_experiment(self._folder / "experiment.yaml").privacy
            charged = self._releases.list_charged()
        except (PerennialError, OSError):
            self.by_site = {}
            return
        if privacy.enabled:
            self.unit, self.delta = privacy.hidden_unit or "", privacy.delta
            self.by_site = {
                site: self._compute_epsilon(entries) for site, entries in charged.items() if entries
            }

    def _compute_epsilon(self, entries: list[Entry]) -> float:
        """By Renyi DP, which bounds every accountant's figure from above and answers at once."""
        counted = Counter(entries)
        key = frozenset(counted.items())
        if key not in self._known:
            try:
                self._known[key] = compose(counted, self.delta, "rdp").epsilon
            except (PerennialError, ValueError, OverflowError):
                self._known[key] = math.inf
        return self._known[key]


class OperatorPages:
    """The pages for one folder of runs.

    Only names that the folder itself lists are ever opened, so no name of an address leads anywhere else.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._watched: dict[str, tuple[RunState, Spending]] = {}
        self._summaries: dict[str, tuple[float, dict[str, Any]]] = {}
        self._turn = threading.RLock()

    def app(self, hosts: set[str]) -> ASGIApp:
        """Build the web application. hosts: names by which it may be asked for."""
        routes = [
            Route("/", self._answer_index),
            Route("/metrics", self._answer_metrics),
            Route("/runs/{name}", self._answer_run),
            Route("/runs/{name}/report.html", self._answer_report),
        ]
        return make_app(routes, hosts, self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async def look() -> None:
            while True:
                await asyncio.to_thread(self.find_faults)
                await asyncio.sleep(LOOK)

        task = asyncio.create_task(look())
        with keep_beating(locate_heartbeat(self.folder)):
            yield
        task.cancel()

    # answers; Starlette calls each in a thread of its own

    def _answer_index(self, request: Request) -> Response:
        return HTMLResponse(self.draw_index())

    def _answer_run(self, request: Request) -> Response:
        return HTMLResponse(self.draw_run(self._check_listed(request)))

    def _answer_report(self, request: Request) -> Response:
        path = self.folder / self._check_listed(request) / "report.html"
        if not path.is_file() or path.is_symlink():
            raise HTTPException(HTTPStatus.NOT_FOUND, "This run has no report yet.")
        return FileResponse(path, headers={"content-security-policy": REPORT_POLICY}, media_type="text/html")

    def _answer_metrics(self, request: Request) -> Response:
        return answer(self.write_metrics())

    def _check_listed(self, request: Request) -> str:
        name = request.path_params["name"]
        if name not in self.names():
            raise HTTPException(HTTPStatus.NOT_FOUND, "There is no such run.")
        return name

    # runs

    def names(self) -> list[str]:
        """Names of the runs, the newest first."""
        found, paths = [], list[Path]()
        with suppress(OSError):
            paths += self.folder.iterdir()
        for path in paths:
            journal = path / EVENTS
            with suppress(OSError):  # it has just gone, or this user may not read it
                if not path.name.startswith(".") and not path.is_symlink() and journal.is_file():
                    found.append((journal.stat().st_mtime, path.name))
        return [name for _, name in sorted(found, reverse=True)]

    def watch(self, name: str) -> tuple[RunState, Spending]:
        """The present state of a run that the folder lists, and what its sites have spent."""
        if name not in self._watched:
            for old in list(self._watched)[: max(0, len(self._watched) - MOST_WATCHED + 1)]:
                del self._watched[old]
            self._watched[name] = RunState(self.folder / name), Spending(self.folder / name)
        state, spending = self._watched[name]
        state.read()
        spending.read()
        return state, spending

    def _list_recent(self) -> list[tuple[RunState, Spending]]:
        """Runs that have no result yet, or had one since yesterday."""
        found = []
        for place, name in enumerate(self.names()):
            over = self._find_end(name)
            if over is None or (place < RECENT and time.time() - over < DAY):
                found.append(self.watch(name))
        return found

    def _find_end(self, name: str) -> float | None:
        """When a run's summary was written; None without one, or while a process works on the run."""
        folder = self.folder / name
        try:
            return None if is_alive(folder / ALIVE) else (folder / "summary.json").stat().st_mtime
        except OSError:
            return None

    def _read_summary(self, name: str, when: float) -> dict[str, Any]:
        """The content of a run's summary.json of that time; {} if it cannot be read."""
        path, known = self.folder / name / "summary.json", self._summaries.get(name)
        if known is None or known[0] != when:
            try:
                found = json.loads(path.read_bytes()) if path.stat().st_size <= LARGEST_SUMMARY else {}
            except (OSError, ValueError, RecursionError):
                found = {}
            known = self._summaries[name] = when, found if isinstance(found, dict) else {}
        return known[1]

    def find_faults(self) -> list[Fault]:
        """The faults of the SuperLink and of recent runs, the gravest first."""
        with self._turn:
            runs = [state for state, _ in self._list_recent()]
            return find_faults(read_superlink_status(self.folder), runs)

    # pages

    def draw_index(self) -> str:
        """The overview of all runs."""
        with self._turn:
            rows = [self._draw_row(name) for name in self.names()[:MOST_RUNS]]
            superlink = read_superlink_status(self.folder)
            return render("index.html", self.find_faults(), superlink=superlink, rows=rows)

    def _draw_row(self, name: str) -> dict[str, Any]:
        if (when := self._find_end(name)) is not None:
            summary = self._read_summary(name, when)
            rounds, accuracy = summary.get("rounds"), number(summary.get("final_accuracy"))
            progress = f"{rounds:,} rounds" if isinstance(rounds, int) else ""
            forgotten, status = number(summary.get("forgetting")), "finished"
        else:
            state, _ = self.watch(name)
            status, accuracy, forgotten = state.status, state.accuracy, state.mean_forgetting
            left = state.seconds_left
            progress = f"round {state.round} of {state.rounds_planned}" if state.rounds_planned else "begins"
            if left is not None and status == "running":
                progress += f", {format_duration(left)} left"
        words = STATUS_WORDS[status]
        facts = {"progress": progress, "accuracy": accuracy, "forgotten": forgotten}
        return {"name": name, "status": status, "words": words, **facts}

    def draw_run(self, name: str) -> str:
        """The page of one run."""
        with self._turn:
            state, spending = self.watch(name)
            sites = state.sites()
            return render(
                "run.html",
                find_faults(state.superlink, [state]),
                state=state,
                words=STATUS_WORDS[state.status],
                story=tell_story(state),
                has_report=(self.folder / name / "report.html").is_file(),
                epsilon={site: format_epsilon(value) for site, value in spending.by_site.items()},
                worst=format_epsilon(max(spending.by_site.values(), default=None)),
                unit=spending.unit,
                sites=sites[:SITES_SHOWN],
                tally=Counter(site.status for site in sites),
                site_words=SITE_WORDS,
                chart=draw_accuracy(state),
                forgotten=state.measure_forgetting(),
                waited=sorted(state.waited_for.items(), key=lambda item: item[1]),
            )

    def write_metrics(self) -> bytes:
        """The metrics of runs, faults and the SuperLink, if there is one."""
        with self._turn:
            faults, runs = self.find_faults(), self._list_recent()
            superlink = read_superlink_status(self.folder)
            found = [] if superlink is None else list(list_superlink_metrics(superlink))
            spent = {state.name: spending.by_site for state, spending in runs}
            return write_metrics(faults, [*found, *list_run_metrics([state for state, _ in runs], spent)])


def tell_story(state: RunState) -> str:
    """One or two sentences on what a run does now."""
    task = f", task {state.task} of {state.tasks}" if state.tasks > 1 else ""
    rounds = (
        f"Round {state.round} of {state.rounds_planned}" if state.rounds_planned else "Before the first round"
    )
    match state.status:
        case "finished":
            took = sum(point.seconds for point in state.rounds)
            return f"Finished after {format_count(len(state.rounds), 'round')}, {duration(took)} of work."
        case "stopped":
            return (
                f"Stopped after {format_count(len(state.rounds), 'round')}, by the operator; it "
                "can be resumed."
            )
        case "silent" | "ended":
            return f"{rounds}{task}. Every finished round is kept."
        case "paused" | "waiting":
            return f"{rounds}{task}. The run rests, and nothing is lost."
    waited, asked = len(state.waited_for), len(state.asked)
    done = f"{asked - waited} of {format_count(asked, 'site')} answered" if asked else "nobody was asked yet"
    left = state.seconds_left
    return f"{rounds}{task}: {done}" + ("." if left is None else f"; about {format_duration(left)} left.")


def draw_accuracy(state: RunState) -> str:
    """Accuracy over rounds, with the tasks; '' before it was measured twice."""
    points = [(float(point.round), point.accuracy) for point in state.rounds]
    if sum(accuracy is not None for _, accuracy in points) < 2:
        return ""
    tasks: dict[int, list[int]] = {}
    for point in state.rounds:
        tasks.setdefault(point.task, []).append(point.round)
    spans = [
        Span(min(rounds) - 0.5, max(rounds) + 0.5, f"task {task}" if len(tasks) <= 6 else "", place % 2 == 0)
        for place, (task, rounds) in enumerate(tasks.items())
    ]
    curve = Curve(
        "accuracy", points, [format_percent(accuracy) for _, accuracy in points], dots=False, bridged=True
    )
    ends = points[0][0] - 0.5, points[-1][0] + 0.5
    across = Axis("round", *ends, "{:.0f}".format, whole=True, grid=False)
    up = Axis(low=0.0, high=1.0, words=lambda share: f"{100 * share:.0f}")
    words = (
        f"Accuracy on all classes seen so far, in percent; the newest is {format_percent(state.accuracy)}."
    )
    return Curves([curve], across, up, 240, spans if len(tasks) > 1 else ()).drawn(1000, words)


def format_epsilon(epsilon: float | None) -> str:
    """An epsilon as text."""
    return "∞" if epsilon is not None and math.isinf(epsilon) else format_decimal(epsilon)
