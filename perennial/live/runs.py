"""The run folders below one folder, as pages show them."""

import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from perennial.deploy.superlink_status import read_superlink_status
from perennial.foundation.heartbeat import is_alive
from perennial.live.board import Board
from perennial.live.diagnosis import diagnosis
from perennial.live.markup import faults_in_words, panel, pill, short_time
from perennial.live.run_page import PANELS, STATUS_WORDS
from perennial.live.run_state import RunState, Status
from perennial.live.spending import Spending
from perennial.live.tail import number, plain
from perennial.server.control import ALIVE
from perennial.server.faults import Fault, of_summary
from perennial.server.journal import EVENTS
from perennial.server.report.markup import (
    MISSING,
    Markup,
    element,
    escape,
    join,
    percent,
    plural,
    points,
    table,
)
from perennial.server.run_record import Summary

MOST_BOARDS = 64
MOST_RUNS = 500
RECENT, DAY = 20, 86_400.0
"""Newest runs of which those that were finished within so many seconds are still watched."""
LARGEST_SUMMARY = 64 * 2**20
SPENDING_EVERY = 2.0
"""Seconds between two looks at what was spent."""


class WatchedRun:
    """One run as a page shows it: its state, its privacy spending and its panels."""

    def __init__(self, folder: Path, budget: float | None = None) -> None:
        self.folder = folder
        self.state, self.spending = RunState(folder), Spending(folder, budget)
        self.board = Board(self.look, self.draw)
        self._counted = 0.0
        self._turn = threading.Lock()
        self._undrawn = True

    def look(self) -> bool:
        """Read what happened in the run; returns whether something is not yet in the panels."""
        with self._turn:
            changed = self.state.read()
            now = time.monotonic()
            if now - self._counted > SPENDING_EVERY:
                self._counted = now
                changed |= self.spending.read()
            self._undrawn |= changed
            return self._undrawn

    def draw(self) -> dict[str, Markup]:
        """Draw every panel of the page; returns them by name."""
        with self._turn:
            self._undrawn = False
            return {name: draw(self.state, self.spending) for name, draw in PANELS.items()}


class Runs:
    """The runs whose folders lie in `folder`.

    Only names that the folder itself lists are ever opened, so no name of an address leads anywhere else.
    budget: as in Spending.
    """

    def __init__(self, folder: Path, budget: float | None = None) -> None:
        self.folder = folder
        self.budget = budget
        self._watched: dict[str, WatchedRun] = {}
        self._summaries: dict[str, tuple[float, dict[str, Any]]] = {}
        self._bad: dict[str, tuple[float, bool]] = {}
        self.board = Board(lambda: False, self._draw, every=1.0)

    def names(self) -> list[str]:
        """Names of the runs, the newest first."""
        found = []
        try:
            for path in self.folder.iterdir():
                journal = path / EVENTS
                if not path.name.startswith(".") and not path.is_symlink() and journal.is_file():
                    found.append((journal.stat().st_mtime, path.name))
        except OSError:
            pass
        return [name for _, name in sorted(found, reverse=True)]

    def get(self, name: str) -> WatchedRun | None:
        """The run called `name`; None if the folder lists no such name."""
        if name not in self.names():
            self._watched.pop(name, None)
            return None
        if name not in self._watched:
            self._make_room()
            self._watched[name] = WatchedRun(self.folder / name, self.budget)
        return self._watched[name]

    def recent(self) -> list[WatchedRun]:
        """Runs that have no result yet, had one since yesterday, or were viewed lately."""
        names = [
            name
            for place, name in enumerate(self.names())
            if name in self._watched or not self.is_over(name) or (place < RECENT and self._is_new(name))
        ]
        return [run for name in names if (run := self.get(name)) is not None]

    def _is_new(self, name: str) -> bool:
        """Whether a finished run had its result within DAY."""
        with suppress(OSError):
            return time.time() - (self.folder / name / "summary.json").stat().st_mtime < DAY
        return False

    def diagnosis(self) -> list[Fault]:
        """The faults of the SuperLink and of recent runs, the gravest first."""
        runs = self.recent()
        for run in runs:
            run.look()
        return diagnosis(read_superlink_status(self.folder), [(run.state, run.spending) for run in runs])

    def watched(self) -> list[WatchedRun]:
        """The runs that are held in memory because somebody viewed them lately."""
        return list(self._watched.values())

    def is_over(self, name: str) -> bool:
        """Whether a run has a summary and no process works on it."""
        folder = self.folder / name
        return (folder / "summary.json").is_file() and not is_alive(folder / ALIVE)

    def summary(self, name: str) -> dict[str, Any]:
        """The content of a run's summary.json; {} if there is none that can be read."""
        path = self.folder / name / "summary.json"
        try:
            facts = path.stat()
            known = self._summaries.get(name)
            if known is not None and known[0] == facts.st_mtime:
                return known[1]
            found = json.loads(path.read_bytes()) if facts.st_size <= LARGEST_SUMMARY else {}
        except (OSError, ValueError, RecursionError):
            return {}
        found = found if isinstance(found, dict) else {}
        self._summaries[name] = facts.st_mtime, found
        return found

    def _draw(self) -> dict[str, Markup]:
        return {"superlink": self.superlink(), "warnings": self.faults(), "runs": self.overview()}

    def faults(self) -> Markup:
        """The faults of recent runs as HTML, and how many older runs have a faulty model."""
        recent = {run.state.name for run in self.recent()}
        older = [name for name in self.names()[:MOST_RUNS] if name not in recent and self.learnt_badly(name)]
        if not older:
            return faults_in_words(self.diagnosis())
        words = (
            f"{plural(len(older), 'older run')} learnt badly; their pages say why: {', '.join(older[:5])}."
        )
        found = self.diagnosis()
        return join([faults_in_words(found) if found else "", element("p", words, "quiet")])

    def learnt_badly(self, name: str) -> bool:
        """Whether a finished run's summary names a fault of its model."""
        content = self.summary(name)
        when = self._summaries.get(name, (0.0,))[0]
        if self._bad.get(name, (0.0,))[0] != when:
            try:
                self._bad[name] = when, any(of_summary(name, Summary.model_validate(content)))
            except (ValueError, TypeError, AttributeError, IndexError):
                self._bad[name] = when, False
        return self._bad.get(name, (0.0, False))[1]

    def superlink(self) -> Markup:
        """A sentence on how many registered sites are connected; '' if there is no SuperLink."""
        status = read_superlink_status(self.folder)
        if status is None:
            return Markup("")
        online = sum(since is None for since in status.sites.values())
        connected = f"{online:,} of {plural(len(status.sites), 'registered site')} connected"
        words = f"The SuperLink serves; {connected}." if status.alive else "The SuperLink does not serve."
        return element("p", words, "story")

    def overview(self) -> Markup:
        """A table of all runs."""
        rows = []
        for name in self.names()[:MOST_RUNS]:
            status, progress, accuracy, forgotten = self._facts(name)
            link = Markup(f'<a href="/runs/{escape(name)}">{escape(name)}</a>')
            chosen = Markup(
                f'<input type="checkbox" name="run" value="{escape(name)}" '
                f'aria-label="compare {escape(name)}">'
            )
            rows.append((link, pill(status, STATUS_WORDS[status]), progress, accuracy, forgotten, chosen))
        if not rows:
            return element("p", "No run yet. The first one appears here by itself.", "story")
        columns = ("run", "state", "progress", "accuracy", "forgetting", "compare")
        return join([table(columns, rows, "llrrrr", "Runs")])

    def _facts(self, name: str) -> tuple[Status, str, str, str]:
        if self.is_over(name):
            summary = self.summary(name)
            rounds = summary.get("rounds")
            return (
                "finished",
                f"{rounds:,} rounds" if isinstance(rounds, int) else MISSING,
                percent(number(summary.get("final_accuracy"))),
                points(number(summary.get("forgetting"))),
            )
        run = self.get(name)
        if run is None:
            return "ended", "", "", ""
        run.look()
        state = run.state
        left = state.seconds_left
        progress = f"round {state.round} of {state.rounds_planned}" if state.rounds_planned else "begins"
        if left is not None and state.status == "running":
            progress += f", {short_time(left)} left"
        return (
            state.status,
            progress,
            percent(state.accuracy),
            points(state.mean_forgetting),
        )

    def _make_room(self) -> None:
        idle = [name for name, run in self._watched.items() if not run.board.watchers]
        for name in idle[: max(0, len(self._watched) - MOST_BOARDS + 1)]:
            del self._watched[name]


def compared(runs: Mapping[str, Mapping[str, Any]]) -> Markup:
    """A table of the results of runs. runs: content of summary.json, by name."""
    rows = []
    for name, summary in runs.items():
        epsilon = summary.get("epsilon")
        spent = number(epsilon.get("value")) if isinstance(epsilon, dict) else None
        sites = summary.get("sites")
        rows.append(
            (
                name,
                plain(summary.get("experiment", MISSING), 60),
                percent(number(summary.get("final_accuracy"))),
                percent(number(summary.get("average_incremental_accuracy"))),
                points(number(summary.get("forgetting"))),
                f"{len(sites):,}" if isinstance(sites, dict) else MISSING,
                MISSING if spent is None else f"{spent:.3g}",
            )
        )
    columns = ("run", "experiment", "final accuracy", "average over tasks", "forgetting", "sites", "epsilon")
    return panel("compared", table(columns, rows, "llrrrrr", "Runs compared"))
