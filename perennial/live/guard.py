"""Checks before every page: its host name and method, and what a browser may do with the answer.

Pages are read-only and listen on loopback. For other machines, put a proxy that signs people in before them.
"""

from collections.abc import Collection
from http import HTTPStatus
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perennial.foundation.errors import StateError

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Whether an address that a server listens on can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


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
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)

        async def with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    found.setdefault(name, value)
            await send(message)

        status, fault = self._fault(scope["method"], headers.get("host", "").lower())
        if fault:
            body = f"{fault}\n".encode()
            start = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(body))}
            raw = [(name.encode(), value.encode()) for name, value in start.items()]
            await with_policy({"type": "http.response.start", "status": status, "headers": raw})
            await with_policy({"type": "http.response.body", "body": body})
        else:
            await self._app(scope, receive, with_policy)

    def _fault(self, method: str, host: str) -> tuple[HTTPStatus, str]:
        name, _, port = host.rpartition(":")
        if host not in self._hosts and not (port.isdigit() and name in self._hosts):
            return HTTPStatus.FORBIDDEN, "These pages are not served under this name."
        if method not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, "These pages are read-only; commands steer."
        return HTTPStatus.OK, ""


def allowed_hosts(host: str, more: Collection[str]) -> set[str]:
    """Host names that pages answer to: `host`, loopback and `more`. Raises StateError for a bad one."""
    for name in more:
        if not name or "/" in name or "@" in name:
            raise StateError(f"host name: found {name!r}, allowed a name without scheme and path")
    return {"localhost", "127.0.0.1", "[::1]", host, *more}
