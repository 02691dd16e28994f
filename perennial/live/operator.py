"""The operator's pages: every run of one folder, watched as events arrive and, with a token, steered."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from perennial.deploy.superlink_status import read_superlink_status
from perennial.foundation.errors import StateError
from perennial.foundation.heartbeat import beating
from perennial.live.charts import share_chart, share_curve
from perennial.live.guard import Sessions, read_form
from perennial.live.markup import confirm, page, panel, sign_in
from perennial.live.metrics import CONTENT_TYPE, run_metrics
from perennial.live.notices import FEDERATION, Notices
from perennial.live.pages import Pages, event_stream, token_wanted, version_seen
from perennial.live.run_page import SITE_WORDS, SitesAsked, sites
from perennial.live.runs import Runs, WatchedRun, compared
from perennial.live.tail import number
from perennial.server.control import clear_request, pages_beat, write_request
from perennial.server.report.markup import Markup, element, escape, join

MOST_WATCHERS = 2000
"""Open streams; whoever comes after them is asked to come back later."""
REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "frame-ancestors 'none'; sandbox allow-scripts"
)
"""A report is one self-contained page: it loads nothing, and is of no origin, so that it reaches no form."""
ASKED = {
    "pause": (
        "Pause",
        "The run finishes the round that it is in, and rests then. A pause lasts until somebody resumes the "
        "run, also over restarts. Nothing is lost, and the model will be the same.",
    ),
    "resume": ("Resume", "The run goes on with its next round."),
    "stop": (
        "Stop",
        "The run ends now. The round that it is in is lost; every round before it is kept, and the run can "
        "be resumed with `perennial deploy resume`, or `perennial run --resume` for a simulation.",
    ),
}


class OperatorPages(Pages):
    """The pages for one folder of runs.

    sessions: who may steer. everyone: whether a person who has not signed in may look. notices: sends faults
    to people, checked every 2 s; None: sends none. budget: as in Spending.
    """

    def __init__(
        self,
        folder: Path,
        sessions: Sessions,
        *,
        everyone: bool = True,
        notices: Notices | None = None,
        budget: float | None = None,
    ) -> None:
        super().__init__(sessions)
        self.runs = Runs(folder, sessions.enabled, budget)
        self._everyone = everyone
        self._notices = notices

    def app(self, hosts: set[str]) -> ASGIApp:
        """Build the web application. hosts: names by which it may be asked for."""
        routes = [
            Route("/", self._read(self.index)),
            Route("/events", self._read(self.index_events)),
            Route("/compare", self._read(self.compare)),
            Route("/metrics", self._read(self.metrics)),
            Route("/runs/{name}", self._read(self.run)),
            Route("/runs/{name}/events", self._read(self.run_events)),
            Route("/runs/{name}/report.html", self._read(self.report)),
            Route("/runs/{name}/{action:str}", self.act, methods=["GET", "POST"]),
        ]
        return self._app(routes, hosts)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self._follow())
        with beating(pages_beat(self.runs.folder)):
            yield
        task.cancel()

    async def _follow(self) -> None:
        """Keep unfinished runs read, so that their pages are there at once; tell of what needs somebody."""
        while True:
            await asyncio.to_thread(self._look_and_tell)
            await asyncio.sleep(2.0)

    def _look_and_tell(self) -> None:
        faults, runs = self.runs.diagnosis(), self.runs.recent()
        if self._notices is not None:
            self._notices.take(FEDERATION, [fault for fault in faults if not fault.run])
            for run in runs:
                name, finished = run.state.name, run.state.status == "finished"
                own = [fault for fault in faults if fault.run == name]
                self._notices.take(name, own, finished=finished)

    # looking

    async def index(self, request: Request) -> Response:
        """Answer with the overview of all runs."""
        panels = await self.runs.board.panels()
        body = Markup(
            f"<h1>Runs</h1>{panel('superlink', panels['superlink'])}{panel('warnings', panels['warnings'])}"
            '<form action="/compare" method="get">'
            f'{panel("runs", panels["runs"])}<p class="actions"><button>Compare the chosen</button></p>'
            "</form>"
        )
        return page("Runs", body, self._where(request), watched=f"/events?v={self.runs.board.version}")

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
        parts = [
            panel(name, drawn[name]) for name in ("headline", "controls", "warnings", "figures", "waiting")
        ]
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
        return page(run.state.name, join(parts), join([links, self._where(request)]), watched=events)

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
        return page("Compared", body, join([Markup('<a href="/">all runs</a>'), self._where(request)]))

    async def metrics(self, request: Request) -> Response:
        """Answer Prometheus with the metrics of runs and of the SuperLink."""
        faults = await asyncio.to_thread(self.runs.diagnosis)
        superlink = await asyncio.to_thread(read_superlink_status, self.runs.folder)
        runs = await asyncio.to_thread(self.runs.recent)
        return Response(run_metrics(runs, faults, superlink), media_type=CONTENT_TYPE)

    # steering

    async def act(self, request: Request) -> Response:
        """Ask whether to pause, resume or stop a run, and do so once the form that asks is submitted."""
        action, run = request.path_params["action"], self._run(request)
        if action not in ASKED:
            raise HTTPException(HTTPStatus.NOT_FOUND, "There is no such page.")
        if not self._sessions.enabled:
            raise HTTPException(HTTPStatus.FORBIDDEN, "These pages are read-only: no token was given.")
        here = f"/runs/{quote(run.state.name)}"
        session = self._sessions.of(request)
        if session is None:
            return sign_in(f"{here}/{action}")
        await asyncio.to_thread(run.look)
        if action not in run.actions():
            raise HTTPException(
                HTTPStatus.CONFLICT, f"This run cannot {action} now: it is {run.state.status}."
            )
        title, text = ASKED[action]
        if request.method == "GET":
            return confirm(f"{title} {run.state.name}?", text, f"{here}/{action}", title, session, here)
        self._sessions.allow_change(request, await read_form(request))
        try:
            if action == "resume":
                clear_request(run.folder)
            else:
                write_request(run.folder, "pause" if action == "pause" else "stop")
        except StateError as error:
            raise HTTPException(HTTPStatus.INTERNAL_SERVER_ERROR, str(error)) from error
        return RedirectResponse(here, HTTPStatus.SEE_OTHER)

    # shared

    def _run(self, request: Request) -> WatchedRun:
        run = self.runs.get(request.path_params["name"])
        if run is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, "There is no such run.")
        return run

    def _read(
        self, handle: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """The handler, for whoever may look."""

        async def checked(request: Request) -> Response:
            may = self._everyone or self._sessions.of(request) or self._sessions.bearer(request)
            if may:
                return await handle(request)
            if request.url.path == "/metrics":
                return token_wanted()
            return sign_in(request.url.path)

        return checked

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
