"""The frame that all pages share, and its small parts."""

import time
from collections.abc import Iterable
from pathlib import Path

from starlette.responses import HTMLResponse

from perennial.server.faults import Fault, grouped
from perennial.server.report.markup import MISSING, Markup, element, escape, join

MOST_FAULTS = 50
STATIC = Path(__file__).parent / "static"
MARK = Markup(
    '<svg viewBox="0 0 24 24" aria-hidden="true"><path fill="none" stroke="currentColor" stroke-width="1.8" '
    'stroke-linecap="round" d="M12 21V11M12 13C7 13 4 10 4 5c5 0 8 3 8 8Z"/>'
    '<path fill="none" stroke="currentColor" stroke-width="1.8" d="M12 11c0-4 2-6 7-6 0 4-2 6-7 6Z"/></svg>'
)


def page(title: str, body: Markup, where: Markup, *, watched: str = "", status: int = 200) -> HTMLResponse:
    """A whole HTML page. where: links at its top. watched: address of the events that update it, or ''."""
    events = f' data-events="{escape(watched)}"' if watched else ""
    return HTMLResponse(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<link rel="icon" href="/static/icon.svg"><link rel="stylesheet" href="/static/live.css">'
        '<script src="/static/live.js" defer></script></head>'
        f'<body{events}><a class="skip" href="#main">to the content</a>'
        f'<header><a class="brand" href="/">{MARK}Perennial</a><nav aria-label="Pages">{where}</nav>'
        '<p id="link" class="link" role="status" hidden></p></header>'
        '<p id="voice" class="unseen" role="status"></p>'
        f'<main id="main" tabindex="-1">{body}</main></body></html>',
        status_code=status,
    )


def panel(name: str, content: Markup, heading: str = "") -> Markup:
    """A section of a page, whose content events replace by its name."""
    return Markup(f'<section id="{escape(name)}" class="panel-{escape(name)}">{heading}{content}</section>')


def message(title: str, text: str, status: int) -> HTMLResponse:
    """A page with a title, one text and a link back, answered with HTTP status `status`."""
    body = join([element("h1", title), element("p", text, "story"), Markup('<p><a href="/">back</a></p>')])
    return page(title, body, Markup(""), status=status)


def heading(status: str, words: str, name: str, story: Markup) -> Markup:
    """The top of a page: a status in words, the name of the run or site, and a sentence on it."""
    state = f'<p class="state">{pill(status, words)}</p>'
    return Markup(f'{state}{element("h1", name)}<p class="story">{story}</p>')


def cards(entries: Iterable[tuple[str, str, str]]) -> Markup:
    """The most important figures as cards. entries: (name, value, note)."""
    inside = "".join(
        f'<div class="card"><dt>{escape(name)}</dt><dd><span class="value">{escape(value)}</span>'
        f'<span class="note">{escape(note)}</span></dd></div>'
        for name, value, note in entries
    )
    return Markup(f'<h2 class="unseen">Figures</h2><dl class="cards">{inside}</dl>')


def since(moment: float | None) -> Markup:
    """How long ago `moment` was (seconds since 1970); the page's script keeps it up to date."""
    if moment is None:
        return Markup(MISSING)
    return Markup(f'<time data-since="{moment:.0f}">{escape(short_time(time.time() - moment))}</time>')


def short_time(seconds: float) -> str:
    """A duration as '12 s', '4 min' or '2 h 5 min', as the page's script writes it too."""
    seconds = max(0, int(seconds))
    if seconds < 120:
        return f"{seconds} s"
    minutes = seconds // 60
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def pill(status: str, words: str) -> Markup:
    """A status as a word in a shape, so that colour alone says nothing."""
    return Markup(f'<span class="pill {escape(status)}">{escape(words)}</span>')


def faults_in_words(faults: Iterable[Fault]) -> Markup:
    """Faults as a list, each with whose turn it is, or one line that says that there are none."""
    found = grouped(faults)
    if not found:
        return Markup('<p class="calm">Nothing needs attention.</p>')
    items = "".join(
        f'<li class="{fault.grade}"><strong>{escape(fault.said)}</strong> {escape(fault.turn)}'
        f"{Markup(f' <span>since {since(fault.since)}</span>') if fault.since else ''}</li>"
        for fault in found[:MOST_FAULTS]
    )
    more = f"<li>and {len(found) - MOST_FAULTS} more</li>" if len(found) > MOST_FAULTS else ""
    return Markup(f'<h2 class="unseen">Needs attention</h2><ul class="warnings">{items}{more}</ul>')
