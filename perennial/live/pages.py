"""The base of the operator's and the hospital's pages: signing in and out, streams of events, error pages."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from perennial.live.guard import Guard, Sessions, read_form
from perennial.live.markup import STATIC, message, sign_in
from perennial.server.report.markup import Markup, escape


class Pages:
    """Pages that people watch, and steer after they have signed in. sessions: those who have."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def _app(self, routes: Sequence[BaseRoute], hosts: set[str]) -> ASGIApp:
        """The application with what all pages have. hosts: names by which it may be asked for."""
        shared = [
            Route("/sign-in", self.sign_in, methods=["GET", "POST"]),
            Route("/sign-out", self.sign_out, methods=["POST"]),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
        handlers = {HTTPException: _error_page}
        app = Starlette(routes=[*routes, *shared], lifespan=self._lifespan, exception_handlers=handlers)
        return Guard(app, hosts)

    def _lifespan(self, app: Starlette) -> AbstractAsyncContextManager[None]:
        """What goes on beside the answers."""
        raise NotImplementedError

    async def sign_in(self, request: Request) -> Response:
        """Answer with the page that asks for the token; begin a session if a submitted form has it."""
        sessions = self._sessions
        if not sessions.enabled:
            raise HTTPException(HTTPStatus.NOT_FOUND, "These pages are read-only: no token was given.")
        if request.method == "GET":
            return sign_in(_inside(request.query_params.get("back", "/")))
        form = await read_form(request)
        back = _inside(form.get("back", "/"))
        if not sessions.holds(form.get("token", "").strip()):
            await asyncio.sleep(0.5)
            return sign_in(back, "This is not the token; after ten wrong ones in a minute none is looked at.")
        answer = RedirectResponse(back, HTTPStatus.SEE_OTHER)
        key, secure = sessions.begin(), sessions.secure
        answer.set_cookie(sessions.cookie, key, httponly=True, samesite="strict", secure=secure, path="/")
        return answer

    async def sign_out(self, request: Request) -> Response:
        """End the session, and lead back to the first page. Raises HTTPException (403) without a session."""
        self._sessions.allow_change(request, await read_form(request))
        self._sessions.end(request)
        return RedirectResponse("/", HTTPStatus.SEE_OTHER)

    def _where(self, request: Request) -> Markup:
        """At the top of a page: a way to sign in or out, where there is a token."""
        if not self._sessions.enabled:
            return Markup('<span class="quiet">read-only</span>')
        session = self._sessions.of(request)
        if session is None:
            return Markup(f'<a href="/sign-in?back={quote(request.url.path)}">sign in</a>')
        return Markup(
            '<form class="inline" method="post" action="/sign-out">'
            f'<input type="hidden" name="form" value="{escape(session.form)}">'
            "<button>sign out</button></form>"
        )


def version_seen(request: Request) -> int:
    """The version of a page that a browser shows, from which its stream of events goes on; 0 if unknown."""
    text = request.headers.get("last-event-id") or request.query_params.get("v", "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


def event_stream(events: AsyncIterator[str], watchers: int, most: int) -> Response:
    """A response that streams events; 503 with a time to retry if `most` watchers or more are there."""
    if watchers >= most:
        return Response(status_code=HTTPStatus.SERVICE_UNAVAILABLE, headers={"retry-after": "30"})
    return StreamingResponse(events, media_type="text/event-stream")


def token_wanted() -> Response:
    """The answer to a program that asks for metrics without the token."""
    return Response(status_code=HTTPStatus.UNAUTHORIZED, headers={"www-authenticate": "Bearer"})


async def _error_page(request: Request, error: Exception) -> Response:
    """A page that says what went wrong."""
    assert isinstance(error, HTTPException)
    return message(HTTPStatus(error.status_code).phrase, error.detail, error.status_code)


def _inside(path: str) -> str:
    """path where it leads to one of these pages, else the first one."""
    return path if path.startswith("/") and not path.startswith("//") and "\\" not in path else "/"
