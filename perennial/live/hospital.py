"""A hospital's page, which listens on its own machine alone."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from perennial.live.board import Board
from perennial.live.diagnosis import of_site
from perennial.live.markup import page, panel
from perennial.live.metrics import CONTENT_TYPE, exposition, fault_metric, gauge
from perennial.live.pages import Pages, event_stream, version_seen
from perennial.live.site_page import PANELS
from perennial.live.site_state import HospitalState
from perennial.server.report.markup import Markup, join


class HospitalPages(Pages):
    """The page of one site.yaml."""

    def __init__(self, path: Path) -> None:
        self.state = HospitalState(path)
        self.board = Board(self._look, self._draw)
        self._turn = threading.Lock()
        self._undrawn = True

    def app(self, hosts: set[str]) -> ASGIApp:
        """Build the web application. hosts: names by which it may be asked for."""
        routes = [
            Route("/", self.index),
            Route("/events", self.events),
            Route("/metrics", self.metrics),
        ]
        return self._app(routes, hosts)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield

    async def index(self, request: Request) -> Response:
        """Answer with the site's page."""
        drawn = await self.board.panels()
        body = join([panel(name, drawn[name]) for name in PANELS])
        watched = f"/events?v={self.board.version}"
        return page(self.state.config.site, body, Markup(""), watched=watched)

    async def events(self, request: Request) -> Response:
        """Stream the changes of the page."""
        return event_stream(self.board.stream(version_seen(request)), self.board.watchers, most=50)

    async def metrics(self, request: Request) -> Response:
        """Answer Prometheus with the site's metrics."""
        await asyncio.to_thread(self._look)
        return Response(await asyncio.to_thread(site_metrics, self.state), media_type=CONTENT_TYPE)

    def _look(self) -> bool:
        with self._turn:
            self._undrawn |= self.state.read()
            return self._undrawn

    def _draw(self) -> dict[str, Markup]:
        with self._turn:
            self._undrawn = False
            return {name: draw(self.state) for name, draw in PANELS.items()}


def site_metrics(state: HospitalState) -> bytes:
    """One site's metrics in Prometheus's text format."""
    site = state.config.site
    ends = Counter(one.ended for one in state.asked)
    figures: dict[str, tuple[str, float | None]] = {
        "site_supernode_up": ("1 while the SuperNode gives signs of life.", state.alive),
        "site_superlink_reachable": ("1 while it answers this site's SuperNode.", state.connected),
        "site_paused": ("1 while the hospital pauses.", bool(state.consent.paused)),
        "site_releases": ("Lines of the ledger.", len(state.releases)),
        "site_offers": ("Apps that wait for a decision.", len(state.offered)),
        "site_ledger_epsilon": ("Epsilon spent over this site's life.", state.epsilon),
        "site_ledger_epsilon_limit": ("Its lifetime budget.", state.limit),
    }
    ended = [((site, end), ends[end]) for end in ("answered", "refused", "failed")]
    return exposition(
        [
            fault_metric(of_site(state)),
            *(
                gauge(name, words, ("site",), [((site,), value)])
                for name, (words, value) in figures.items()
                if value is not None
            ),
            gauge("site_requests", "The newest requests by how they ended.", ("site", "ended"), ended),
        ]
    )
