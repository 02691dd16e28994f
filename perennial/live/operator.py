"""The operator's pages: every run of one folder, watched as events arrive."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from perennial.deploy.superlink_status import read_superlink_status
from perennial.foundation.heartbeat import beating
from perennial.live.charts import share_chart, share_curve
from perennial.live.markup import page, panel
from perennial.live.metrics import CONTENT_TYPE, run_metrics
from perennial.live.pages import Pages, event_stream, version_seen
from perennial.live.run_page import SITE_WORDS, SitesAsked, sites
from perennial.live.runs import Runs, WatchedRun, compared
from perennial.live.tail import number
from perennial.server.control import pages_beat
from perennial.server.report.markup import Markup, element, escape, join

MOST_WATCHERS = 2000
"""Open streams; whoever comes after them is asked to come back later."""
REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "frame-ancestors 'none'; sandbox allow-scripts"
)
"""A report is one self-contained page: it loads nothing, and is of no origin, so that it reaches no form."""


class OperatorPages(Pages):
    """The pages for one folder of runs.

    budget: as in Spending.
    """

    def __init__(self, folder: Path, *, budget: float | None = None) -> None:
        self.runs = Runs(folder, budget)

    def app(self, hosts: set[str]) -> ASGIApp:
        """Build the web application. hosts: names by which it may be asked for."""
        routes = [
            Route("/", self.index),
            Route("/events", self.index_events),
            Route("/compare", self.compare),
            Route("/metrics", self.metrics),
            Route("/runs/{name}", self.run),
            Route("/runs/{name}/events", self.run_events),
            Route("/runs/{name}/report.html", self.report),
        ]
        return self._app(routes, hosts)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self._follow())
        with beating(pages_beat(self.runs.folder)):
            yield
        task.cancel()

    async def _follow(self) -> None:
        """Keep unfinished runs read, so that their pages are there at once."""
        while True:
            await asyncio.to_thread(self.runs.diagnosis)
            await asyncio.sleep(2.0)

    async def index(self, request: Request) -> Response:
        """Answer with the overview of all runs."""
        panels = await self.runs.board.panels()
        body = Markup(
            f"<h1>Runs</h1>{panel('superlink', panels['superlink'])}{panel('warnings', panels['warnings'])}"
            '<form action="/compare" method="get">'
            f'{panel("runs", panels["runs"])}<p class="actions"><button>Compare the chosen</button></p>'
            "</form>"
        )
        return page("Runs", body, Markup(""), watched=f"/events?v={self.runs.board.version}")

    async def index_events(self, request: Request) -> Response:
        """Stream the changes of the overview."""
        return self._stream(self.runs.board.stream(version_seen(request)))

    async def run(self, request: Request) -> Response:
        """Answer with the page of one run."""
        run = self._run(request)
        asked = SitesAsked.of(request.query_params)
        drawn = await run.board.panels()
        if asked != SitesAsked():
            drawn["sites"] = sites(run.state, run.spending, asked)
        heading = _site_search(asked)
        parts = [panel(name, drawn[name]) for name in ("headline", "warnings", "figures", "waiting")]
        listed = Markup(
            f'<section aria-labelledby="sites-title">{heading}<div id="sites">{drawn["sites"]}</div>'
            "</section>"
        )
        parts += [listed, *(panel(name, drawn[name]) for name in ("learning", "classes", "privacy", "notes"))]
        name = quote(run.state.name)
        query = request.url.query
        events = f"/runs/{name}/events?v={run.board.version}" + (f"&{query}" if asked != SitesAsked() else "")
        links = Markup(f'<a href="/">all runs</a><a href="/runs/{name}/report.html">report</a>')
        if not (run.folder / "report.html").is_file():
            links = Markup('<a href="/">all runs</a>')
        return page(run.state.name, join(parts), links, watched=events)

    async def run_events(self, request: Request) -> Response:
        """Stream the changes of one run's page."""
        run, asked = self._run(request), SitesAsked.of(request.query_params)
        stream = run.board.stream(version_seen(request))
        if asked != SitesAsked():
            stream = _with_own_sites(stream, run, asked)
        return self._stream(stream)

    async def report(self, request: Request) -> Response:
        """Answer with the report of a finished run. Raises HTTPException (404) before there is one."""
        path = self._run(request).folder / "report.html"
        if not path.is_file() or path.is_symlink():
            raise HTTPException(HTTPStatus.NOT_FOUND, "This run has no report yet.")
        return FileResponse(path, headers={"content-security-policy": REPORT_POLICY}, media_type="text/html")

    async def compare(self, request: Request) -> Response:
        """Answer with finished runs side by side. Raises HTTPException (404) if none of them is finished."""
        chosen = [name for name in request.query_params.getlist("run") if self.runs.get(name) is not None]
        summaries = {name: found for name in chosen[:12] if (found := self.runs.summary(name))}
        if not summaries:
            raise HTTPException(HTTPStatus.NOT_FOUND, "Choose runs that are finished, to compare them.")
        lines = [share_curve(name, _averages(found)) for name, found in summaries.items()]
        last = max((line.points[-1][0] for line in lines if line.points), default=1.0)
        words = "Accuracy on all classes seen so far, after each task, in percent."
        chart = share_chart(lines, 1.0, last, words, unit="after task")
        figure = Markup(
            f"<figure><figcaption><h2>After each task</h2><p>{words}</p></figcaption>{chart}</figure>"
        )
        body = join([element("h1", "Compared"), compared(summaries), figure])
        return page("Compared", body, Markup('<a href="/">all runs</a>'))

    async def metrics(self, request: Request) -> Response:
        """Answer Prometheus with the metrics of runs and of the SuperLink."""
        faults = await asyncio.to_thread(self.runs.diagnosis)
        superlink = await asyncio.to_thread(read_superlink_status, self.runs.folder)
        runs = await asyncio.to_thread(self.runs.recent)
        return Response(run_metrics(runs, faults, superlink), media_type=CONTENT_TYPE)

    def _run(self, request: Request) -> WatchedRun:
        run = self.runs.get(request.path_params["name"])
        if run is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, "There is no such run.")
        return run

    def _stream(self, events: AsyncIterator[str]) -> Response:
        watching = self.runs.board.watchers + sum(run.board.watchers for run in self.runs.watched())
        return event_stream(events, watching, MOST_WATCHERS)


async def _with_own_sites(
    stream: AsyncIterator[str], run: WatchedRun, asked: SitesAsked
) -> AsyncIterator[str]:
    """The stream of everybody, with the table of sites as this person asked for it."""
    async for event in stream:
        head, separator, data = event.partition("data: ")
        if not separator:
            yield event
            continue
        panels: dict[str, Any] = json.loads(data)
        if "sites" in panels:
            panels["sites"] = sites(run.state, run.spending, asked)
        yield f"{head}data: {json.dumps(panels)}\n\n"


def _site_search(asked: SitesAsked) -> Markup:
    options = "".join(
        f'<option value="{state}"{" selected" if state == asked.state else ""}>{escape(words)}</option>'
        for state, words in SITE_WORDS.items()
    )
    return Markup(
        '<div class="row"><h2 id="sites-title">Sites</h2><form class="find" method="get" role="search">'
        '<label for="site">name</label>'
        f'<input id="site" name="site" value="{escape(asked.text)}" maxlength="80">'
        f'<label for="state">state</label><select id="state" name="state">'
        f'<option value="">all</option>{options}</select>'
        "<button>Find</button></form></div>"
    )


def _averages(summary: dict[str, Any]) -> list[tuple[float, float | None]]:
    averages = summary.get("average_accuracy")
    return [
        (float(i), number(value)) for i, value in enumerate(averages if isinstance(averages, list) else (), 1)
    ]
