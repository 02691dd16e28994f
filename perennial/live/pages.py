"""The base of the operator's and the hospital's pages: streams of events, error pages."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from perennial.live.guard import Guard
from perennial.live.markup import STATIC, message


class Pages:
    """Read-only pages that people watch."""

    def _app(self, routes: Sequence[BaseRoute], hosts: set[str]) -> ASGIApp:
        """The application with what all pages have. hosts: names by which it may be asked for."""
        static = Mount("/static", StaticFiles(directory=STATIC))
        handlers = {HTTPException: _error_page}
        app = Starlette(routes=[*routes, static], lifespan=self._lifespan, exception_handlers=handlers)
        return Guard(app, hosts)

    def _lifespan(self, app: Starlette) -> AbstractAsyncContextManager[None]:
        """What goes on during the answers."""
        raise NotImplementedError


def version_seen(request: Request) -> int:
    """The version of a page that a browser shows, from which its stream of events goes on; 0 if unknown."""
    text = request.headers.get("last-event-id") or request.query_params.get("v", "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


def event_stream(events: AsyncIterator[str], watchers: int, most: int) -> Response:
    """A response that streams events; 503 with a time to retry if `most` watchers or more are there."""
    if watchers >= most:
        return Response(status_code=HTTPStatus.SERVICE_UNAVAILABLE, headers={"retry-after": "30"})
    return StreamingResponse(events, media_type="text/event-stream")


async def _error_page(request: Request, error: Exception) -> Response:
    """A page that says what went wrong."""
    assert isinstance(error, HTTPException)
    return message(HTTPStatus(error.status_code).phrase, error.detail, error.status_code)
