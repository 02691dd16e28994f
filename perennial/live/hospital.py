"""A hospital's page, which listens on its own machine alone and asks everybody to sign in."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from perennial.client import consent
from perennial.config.site_edit import stop_answering
from perennial.deploy.approval import approve, disapprove, read_offer, require_hash
from perennial.deploy.signing import check_signature
from perennial.foundation.errors import PerennialError, StateError
from perennial.live.board import Board
from perennial.live.diagnosis import of_site
from perennial.live.guard import Session, Sessions, read_form
from perennial.live.markup import confirm, page, panel
from perennial.live.metrics import CONTENT_TYPE, exposition, fault_metric, gauge
from perennial.live.notices import Notices
from perennial.live.pages import Pages, event_stream, token_wanted, version_seen
from perennial.live.site_page import PANELS
from perennial.live.site_state import HospitalState
from perennial.server.faults import Fault
from perennial.server.report.markup import Markup, escape, join

REFUSED = ".refused"
"""Suffix of an offered app that the hospital has refused."""
TITLES = {
    "pause": (
        "Pause?",
        "Until you resume, every request is refused, and the operator reads that this site pauses.",
        "Pause",
    ),
    "resume": ("Resume?", "Requests are answered again, as site.yaml allows.", "Resume"),
    "withdraw-digests": (
        "Withdraw digests?",
        "site.yaml answers no request for digests any more. With the next reply of each run the server is "
        "told so, and deletes what it keeps. What was learnt from them stays in the model.",
        "Withdraw digests",
    ),
    "withdraw": (
        "Withdraw from this run?",
        "This site takes no further part in it, for good: what it keeps of the run is removed here, and "
        "requests are refused. What had left before stays in the ledger. Its sums can be taken out of a "
        "closed-form model exactly: tell the operator. A trained model cannot; it "
        "would have to be trained again without this site.",
        "Withdraw",
    ),
    "approve": (
        "Approve this app?",
        "An experiment with exactly these settings may then run here. Type or paste the SHA-256 that the "
        "operator told you by another way than the file came, best by telephone.",
        "Approve",
    ),
    "refuse": (
        "Refuse this app?",
        "It is set aside and not offered again. Nothing changes that runs here.",
        "Refuse",
    ),
    "disapprove": (
        "Take this approval back?",
        "Nothing of this app runs here from its next message on.",
        "Disapprove",
    ),
}


class HospitalPages(Pages):
    """The page of one site.yaml. notices: sends its faults to people, checked every 2 s; None: sends none."""

    def __init__(self, path: Path, sessions: Sessions, notices: Notices | None = None) -> None:
        super().__init__(sessions)
        self.state = HospitalState(path)
        self.board = Board(self._look, self._draw)
        self._notices = notices
        self._turn = threading.Lock()
        self._undrawn = True

    def app(self, hosts: set[str]) -> ASGIApp:
        """Build the web application. hosts: names by which it may be asked for."""
        routes = [
            Route("/", self.index),
            Route("/events", self.events),
            Route("/metrics", self.metrics),
            *(Route(f"/{action}", self.act, methods=["GET", "POST"]) for action in TITLES),
        ]
        return self._app(routes, hosts)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        task = None if self._notices is None else asyncio.create_task(self._tell(self._notices))
        yield
        if task is not None:
            task.cancel()

    async def _tell(self, notices: Notices) -> None:
        while True:
            await asyncio.to_thread(self._look)
            notices.take(self.state.config.site, await asyncio.to_thread(self._faults))
            await asyncio.sleep(2.0)

    async def index(self, request: Request) -> Response:
        """Answer with the site's page, or lead a visitor who is not signed in to sign in."""
        if self._sessions.of(request) is None:
            return RedirectResponse("/sign-in", HTTPStatus.SEE_OTHER)
        drawn = await self.board.panels()
        body = join([panel(name, drawn[name]) for name in PANELS])
        watched = f"/events?v={self.board.version}"
        return page(self.state.config.site, body, self._where(request), watched=watched)

    async def events(self, request: Request) -> Response:
        """Stream the changes of the page. Raises HTTPException (403) for a visitor who is not signed in."""
        if self._sessions.of(request) is None:
            raise HTTPException(HTTPStatus.FORBIDDEN, "Sign in first.")
        return event_stream(self.board.stream(version_seen(request)), self.board.watchers, most=50)

    async def metrics(self, request: Request) -> Response:
        """Answer Prometheus with the site's metrics; 401 without session or token."""
        if self._sessions.of(request) is None and not self._sessions.bearer(request):
            return token_wanted()
        await asyncio.to_thread(self._look)
        return Response(await asyncio.to_thread(site_metrics, self.state), media_type=CONTENT_TYPE)

    async def act(self, request: Request) -> Response:
        """Show what an action would do, and do it once the form on that page is submitted.

        Raises HTTPException if the form is not this session's (403) or the action fails (409).
        """
        action = request.url.path[1:]
        session = self._sessions.of(request)
        if session is None:
            return RedirectResponse("/sign-in", HTTPStatus.SEE_OTHER)
        if request.method == "GET":
            return self._asked(action, request.query_params, session)
        form = await read_form(request)
        self._sessions.allow_change(request, form)
        try:
            await asyncio.to_thread(self._do, action, form)
        except PerennialError as error:
            raise HTTPException(HTTPStatus.CONFLICT, str(error)) from error
        self.state.refresh()
        return RedirectResponse("/", HTTPStatus.SEE_OTHER)

    def _asked(self, action: str, query: Mapping[str, str], session: Session) -> Response:
        title, text, button = TITLES[action]
        hidden = {key: query[key][:200] for key in ("app", "run") if key in query}
        named = hidden.get("app") or self.state.names.get(hidden.get("run", "")) or hidden.get("run", "")
        fields = Markup(f"<p><code>{escape(named)}</code></p>") if named else Markup("")
        if action == "approve":
            fields += Markup(
                '<label for="sha256">SHA-256</label><input id="sha256" name="sha256" required minlength="64" '
                'maxlength="64" pattern="[0-9a-fA-F]{64}" autocomplete="off" spellcheck="false">'
            )
        return confirm(title, text, f"/{action}", button, session, "/", Markup(fields), hidden)

    def _do(self, action: str, form: Mapping[str, str]) -> None:
        """Raises PerennialError with a sentence for the person who asked."""
        config, state_dir = self.state.config, self.state.config.state_dir
        steps: dict[str, Callable[[], object]] = {
            "pause": lambda: consent.pause(state_dir),
            "resume": lambda: consent.resume(state_dir),
            "withdraw": lambda: consent.withdraw(state_dir, form.get("run", "")),
            "withdraw-digests": lambda: stop_answering(self.state.path, "digest"),
            "approve": lambda: self._approve(self._offer(form), form.get("sha256", "").strip()),
            "refuse": lambda: _set_aside(self._offer(form)),
            "disapprove": lambda: disapprove(form.get("app", ""), self._flower_home(), config.approvals),
        }
        with self._turn:
            steps[action]()

    def _approve(self, fab: Path, sha256: str) -> None:
        offer = read_offer(fab, self.state.config)
        check_signature(fab, self.state.folder / "publisher.pub", offer.data)
        require_hash(offer, sha256)
        approve(offer, self._flower_home(), self.state.config.approvals)

    def _offer(self, form: Mapping[str, str]) -> Path:
        """An offered app by its name: one that the folder lists, and nothing else."""
        found = {path.name: path for path in self.state.offered}
        if form.get("app") not in found:
            raise StateError("This app is not offered here.")
        return found[form["app"]]

    def _flower_home(self) -> Path:
        connection = self.state.config.connection
        if connection is None:
            raise StateError("site.yaml has no connection, so no app runs here.")
        return self.state.folder / connection.flower_home

    def _look(self) -> bool:
        with self._turn:
            self._undrawn |= self.state.read()
            return self._undrawn

    def _faults(self) -> list[Fault]:
        with self._turn:
            return of_site(self.state)

    def _draw(self) -> dict[str, Markup]:
        with self._turn:
            self._undrawn = False
            return {name: draw(self.state) for name, draw in PANELS.items()}


def _set_aside(fab: Path) -> None:
    try:
        fab.rename(fab.with_name(fab.name + REFUSED))
    except OSError as error:
        raise StateError(f"{fab}: cannot be set aside ({error.strerror})") from error


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
