"""Checks before every page: who asks, under which host name, and what a browser may do with the answer.

Pages are read-only for whoever has no token. With one, a person signs in: the token is sent once, in the body
of a form, and a random session stands for it in a cookie that no script can read. A form that changes
something carries a word that belongs to the session, and comes from the page's own origin.
"""

import hmac
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from http import HTTPStatus
from ipaddress import ip_address
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perennial.foundation.errors import StateError

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    # not no-referrer, under which browsers send forms with the origin "null"
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}
LARGEST_FORM = 64 * 1024
"""Bytes of the body of a form."""
SESSION_SECONDS = 8 * 3600.0
MOST_SESSIONS = 100
WRONG_TOKENS, PER_SECONDS = 10, 60.0
"""(wrong tokens, seconds): after so many within that time, no token is accepted."""


def is_loopback(host: str) -> bool:
    """Whether an address that a server listens on can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass
class Session:
    """A signed-in person's session. until: its end, monotonic. form: the secret that its forms carry."""

    until: float
    form: str = field(default_factory=lambda: secrets.token_urlsafe(24))


class Sessions:
    """The sessions of people who have signed in with the token; token None lets nobody sign in."""

    def __init__(self, token: str | None, cookie: str, *, secure: bool) -> None:
        self.enabled = token is not None
        self.cookie = f"__Host-{cookie}" if secure else cookie
        self.secure = secure
        self._token = None if token is None else sha256(token.encode()).digest()
        self._sessions: dict[str, Session] = {}
        self._wrong: list[float] = []

    def holds(self, token: str) -> bool:
        """Whether this is the token; takes equally long for any wrong one. After too many of them: False."""
        now = time.monotonic()
        self._wrong = [when for when in self._wrong if now - when < PER_SECONDS]
        if self._token is None or len(self._wrong) >= WRONG_TOKENS:
            return False
        right = hmac.compare_digest(sha256(token.encode()).digest(), self._token)
        if not right:
            self._wrong.append(now)
        return right

    def begin(self) -> str:
        """Begin a session, and return the id that its cookie carries."""
        now = time.monotonic()
        self._sessions = {key: found for key, found in self._sessions.items() if found.until > now}
        while len(self._sessions) >= MOST_SESSIONS:
            self._sessions.pop(next(iter(self._sessions)))
        identity = secrets.token_urlsafe(32)
        self._sessions[_hashed(identity)] = Session(now + SESSION_SECONDS)
        return identity

    def of(self, request: Request) -> Session | None:
        """The session that a request's cookie names, or None if it has ended."""
        found = self._sessions.get(_hashed(request.cookies.get(self.cookie, "")))
        return found if found is not None and found.until > time.monotonic() else None

    def end(self, request: Request) -> None:
        """Sign out the person whose request this is."""
        self._sessions.pop(_hashed(request.cookies.get(self.cookie, "")), None)

    def bearer(self, request: Request) -> bool:
        """Whether a request has the token in its Authorization header (Bearer), as Prometheus sends it."""
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and self.holds(token.strip())

    def allow_change(self, request: Request, form: Mapping[str, str]) -> None:
        """Raise HTTPException (403) unless a signed-in person sent this form from one of these pages."""
        session = self.of(request)
        if session is None:
            raise HTTPException(HTTPStatus.FORBIDDEN, "Sign in first.")
        if not hmac.compare_digest(form.get("form", "").encode(), session.form.encode()):
            raise HTTPException(HTTPStatus.FORBIDDEN, "This form is not from this page, or is too old.")


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a submitted form. Raises HTTPException if it is too large or no form."""
    if request.headers.get("content-type", "").split(";")[0].strip() != "application/x-www-form-urlencoded":
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Only a form is taken here.")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST_FORM:
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "This form is too large.")
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=50))
    except ValueError as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, "This form cannot be read.") from error


class Guard:
    """Refuses requests under foreign names or from foreign origins, and adds security headers to answers.

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
        fault = self._fault(scope["method"], headers)

        async def with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    found.setdefault(name, value)
            await send(message)

        if fault:
            body = f"{fault}\n".encode()
            start = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(body))}
            raw = [(name.encode(), value.encode()) for name, value in start.items()]
            await with_policy({"type": "http.response.start", "status": 403, "headers": raw})
            await with_policy({"type": "http.response.body", "body": body})
        else:
            await self._app(scope, receive, with_policy)

    def _fault(self, method: str, headers: Headers) -> str:
        host = headers.get("host", "").lower()
        if not self._known(host):
            return "These pages are not served under this name."
        if method in ("GET", "HEAD"):
            return ""
        origin = headers.get("origin", "")
        if (
            urlsplit(origin).netloc.lower() != host
            or headers.get("sec-fetch-site", "same-origin") != "same-origin"
        ):
            return "Only a form of these pages themselves is taken."
        return ""

    def _known(self, host: str) -> bool:
        name, _, port = host.rpartition(":")
        return host in self._hosts or (port.isdigit() and name in self._hosts)


def _hashed(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def allowed_hosts(host: str, more: Collection[str]) -> set[str]:
    """Host names that pages answer to: `host`, loopback and `more`. Raises StateError for a bad one."""
    for name in more:
        if not name or "/" in name or "@" in name:
            raise StateError(f"host name: found {name!r}, allowed a name without scheme and path")
    return {"localhost", "127.0.0.1", "[::1]", host, *more}
