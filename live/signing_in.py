"""Signing in and out, which the pages of operator and hospital share, and the page of an error."""

import asyncio
from http import HTTPStatus
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from perennial.live.guard import Sessions, read_form
from perennial.live.markup import message, sign_in
from perennial.server.report.markup import Markup, escape


def signed_in_words(request: Request, sessions: Sessions) -> Markup:
    """At the top of a page: a way to sign in or out, where there is a token."""
    if not sessions.enabled:
        return Markup('<span class="quiet">read-only</span>')
    session = sessions.of(request)
    if session is None:
        return Markup(f'<a href="/sign-in?back={quote(request.url.path)}">sign in</a>')
    return Markup(
        '<form class="inline" method="post" action="/sign-out">'
        f'<input type="hidden" name="form" value="{escape(session.form)}"><button>sign out</button></form>'
    )


async def answer_sign_in(request: Request, sessions: Sessions) -> Response:
    """The page that asks for the token, or the session that it begins."""
    if request.method == "GET":
        return sign_in(_inside(request.query_params.get("back", "/")))
    form = await read_form(request)
    back = _inside(form.get("back", "/"))
    if not sessions.holds(form.get("token", "").strip()):
        await asyncio.sleep(0.5)
        return sign_in(back, "This is not the token; after ten wrong ones in a minute none is looked at.")
    answer = RedirectResponse(back, HTTPStatus.SEE_OTHER)
    answer.set_cookie(
        sessions.cookie, sessions.begin(), httponly=True, samesite="strict", secure=sessions.secure, path="/"
    )
    return answer


async def answer_sign_out(request: Request, sessions: Sessions) -> Response:
    """End the session, and lead back to the first page."""
    sessions.allow_change(request, await read_form(request))
    sessions.end(request)
    return RedirectResponse("/", HTTPStatus.SEE_OTHER)


async def error_page(request: Request, error: Exception) -> Response:
    """A page that says what went wrong."""
    assert isinstance(error, HTTPException)
    return message(HTTPStatus(error.status_code).phrase, error.detail, error.status_code)


def _inside(path: str) -> str:
    """path where it leads to one of these pages, else the first one."""
    return path if path.startswith("/") and not path.startswith("//") and "\\" not in path else "/"
