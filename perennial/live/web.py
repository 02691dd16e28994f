"""The web application of both kinds of pages: who may ask, and how answers look.

Pages are read-only and listen on loopback. For other machines, put a proxy that signs people in before them.
"""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path
from socket import socket
from typing import Any

import uvicorn
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perennial.foundation.errors import StateError
from perennial.server.faults import Fault, group_faults
from perennial.server.report.markup import (
    MISSING,
    duration,
    format_count,
    format_decimal,
    format_percent,
    format_points,
    format_size,
)

HERE = Path(__file__).parent
MOST_CONNECTIONS = 1000
MOST_FAULTS = 50
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}
Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


def format_duration(seconds: float) -> str:
    """A duration as '12 s', '4 min' or '2 h 5 min', as the page's script writes it too."""
    seconds = max(0, int(seconds))
    if seconds < 120:
        return f"{seconds} s"
    minutes = seconds // 60
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


_PAGES = Environment(
    loader=FileSystemLoader(HERE / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_PAGES.filters |= {
    **{
        "percent": format_percent,
        "points": format_points,
        "decimal": format_decimal,
        "duration": duration,
        "size": format_size,
    },
    **{
        "plural": format_count,
        "short": format_duration,
        "ago": lambda moment: format_duration(time.time() - moment),
    },
}
_PAGES.globals |= {"MISSING": MISSING}


def render(template: str, faults: Sequence[Fault] = (), **values: Any) -> str:
    """A page from a template of `live/templates`. faults: of which it shows MOST_FAULTS."""
    found = group_faults(faults)
    shown = {"faults": found[:MOST_FAULTS], "more_faults": len(found) - MOST_FAULTS}
    return _PAGES.get_template(template).render(**shown, **values)


def make_app(
    routes: Sequence[BaseRoute], hosts: Collection[str], lifespan: Lifespan | None = None
) -> ASGIApp:
    """The application with what all pages have. hosts: names by which it may be asked for."""
    static = Mount("/static", StaticFiles(directory=HERE / "static"))
    handlers = {HTTPException: _answer_error}
    return Guard(Starlette(routes=[*routes, static], lifespan=lifespan, exception_handlers=handlers), hosts)


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    title = HTTPStatus(error.status_code).phrase
    return HTMLResponse(render("message.html", title=title, text=error.detail), error.status_code)


class Guard:
    """Refuses foreign names and requests that would change something, and adds security headers.

    hosts: names, with or without port, by which the pages may be asked for. A name that an attacker's DNS
    points here (DNS rebinding) is none of them.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    found.setdefault(name, value)
            await send(message)

        answer = self._app if scope["type"] != "http" else self._refuse(scope) or self._app
        await answer(scope, receive, send_guarded)

    def _refuse(self, scope: Scope) -> Response | None:
        host = Headers(scope=scope).get("host", "").lower()
        name, _, port = host.rpartition(":")
        if host not in self._hosts and not (port.isdigit() and name in self._hosts):
            return PlainTextResponse("These pages are not served under this name.\n", HTTPStatus.FORBIDDEN)
        if scope["method"] not in ("GET", "HEAD"):
            words = "These pages are read-only; commands steer.\n"
            return PlainTextResponse(words, HTTPStatus.METHOD_NOT_ALLOWED)
        return None


def is_loopback(host: str) -> bool:
    """Whether an address that a server listens on can be reached from this machine alone."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def list_allowed_hosts(host: str, more: Collection[str]) -> set[str]:
    """Host names that pages answer to: `host`, loopback and `more`. Raises StateError for a bad one."""
    for name in more:
        if not name or "/" in name or "@" in name:
            raise StateError(f"host name: found {name!r}, allowed a name without scheme and path")
    return {"localhost", "127.0.0.1", "[::1]", host, *more}


class _Server(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config, listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._listening = listening

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._listening()


def make_server(
    app: ASGIApp, host: str, port: int, listening: Callable[[], None] = lambda: None
) -> uvicorn.Server:
    """A web server, not yet started, that logs no request. listening: called once the server answers."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=2,
    )
    return _Server(config, listening)
