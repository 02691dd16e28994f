"""The page of one run: panels of HTML, each drawn again when what it shows has changed."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args
from urllib.parse import urlencode

from perennial.live.charts import meter, share_chart, share_curve
from perennial.live.diagnosis import diagnosis
from perennial.live.markup import cards, faults_in_words, heading, pill, short_time, since
from perennial.live.run_state import SITE_ORDER, RunState, SiteNow, Status
from perennial.live.site_rows import beside_each_other
from perennial.live.spending import Spending
from perennial.server.charts.curves import AxisMark
from perennial.server.report.markup import (
    MISSING,
    Markup,
    decimal,
    duration,
    element,
    escape,
    join,
    percent,
    plural,
    points,
    power,
    table,
)

SITES_SHOWN = 50
"""Rows of the table of sites; the others are found by name or state, or on further pages."""
CLASSES_SHOWN = 12
STATUS_WORDS = {status: status for status in get_args(Status)}
STATUS_WORDS |= {"waiting": "waiting for sites", "silent": "no sign of life", "ended": "ended early"}
SITE_WORDS = {status: status for status in SITE_ORDER} | {"training": "working", "unknown": "took part"}


@dataclass(frozen=True)
class SitesAsked:
    """Which sites a person wants to see. text: part of a name; state: '' for all; page: from 1."""

    text: str = ""
    state: str = ""
    page: int = 1

    @classmethod
    def of(cls, query: Mapping[str, str]) -> "SitesAsked":
        """Read the choice from the query of a page's address; unknown or invalid values are left out."""
        state = query.get("state", "")
        page = query.get("page", "1")
        return cls(
            query.get("site", "")[:80],
            state if state in SITE_WORDS else "",
            int(page) if page.isascii() and page.isdigit() and 0 < len(page) < 7 and int(page) else 1,
        )


def headline(state: RunState, spending: Spending) -> Markup:
    """Name, status and one sentence; screen readers announce the status (live.js)."""
    return heading(state.status, STATUS_WORDS[state.status], state.name, escape(story(state)))


def story(state: RunState) -> str:
    """One or two sentences on what the run does now."""
    task = f", task {state.task} of {state.tasks}" if state.tasks > 1 else ""
    rounds = (
        f"Round {state.round} of {state.rounds_planned}" if state.rounds_planned else "Before the first round"
    )
    match state.status:
        case "finished":
            took = sum(point.seconds for point in state.rounds)
            return f"Finished after {plural(len(state.rounds), 'round')}, {duration(took)} of work."
        case "stopped":
            return f"Stopped after {plural(len(state.rounds), 'round')}, by the operator; it can be resumed."
        case "silent" | "ended":
            return f"{rounds}{task}. Every finished round is kept."
        case "paused" | "waiting":
            return f"{rounds}{task}. The run rests, and nothing is lost."
    waited, asked = len(state.waited_for), len(state.asked)
    done = f"{asked - waited} of {plural(asked, 'site')} answered" if asked else "nobody was asked yet"
    left = state.seconds_left
    return f"{rounds}{task}: {done}" + ("." if left is None else f"; about {short_time(left)} left.")


def faults(state: RunState, spending: Spending) -> Markup:
    """The run's faults, the gravest first, or a line that says that there are none."""
    return faults_in_words(diagnosis(state.superlink, [(state, spending)]))


def figures(state: RunState, spending: Spending) -> Markup:
    """The most important numbers: accuracy, forgetting, sites, skipped rounds, time, epsilon."""
    forgotten = [value for value in state.forgetting() if value is not None]
    worst = max(spending.by_site.values(), default=None)
    last = state.rounds[-1] if state.rounds else None
    known = f"of {len(state.site_names()):,} known"
    spent = f"for one {spending.unit}, the worst site" if spending.unit else "nothing is protected by noise"
    entries = [
        ("accuracy", percent(state.accuracy), "on all classes seen so far"),
        ("forgetting", points(state.mean_forgetting), _worst(forgotten)),
        ("sites in the last round", MISSING if last is None else f"{last.sites:,}", known),
        ("rounds skipped", f"{state.skipped:,}", f"of {len(state.rounds):,}"),
        ("time a round", MISSING if last is None else duration(last.seconds), "the last one"),
        ("epsilon spent", _epsilon(worst), spent),
    ]
    return cards(entries)


def _worst(forgotten: Sequence[float]) -> str:
    return "points, mean over tasks" + (f"; the worst task {points(max(forgotten))}" if forgotten else "")


def waiting(state: RunState, spending: Spending) -> Markup:
    """The sites that the round waits for, and since when."""
    if state.status != "running" or not state.asked:
        return Markup("")
    waited = sorted(state.waited_for.items(), key=lambda item: item[1])
    share = 1 - len(waited) / len(state.asked)
    words = f"{len(state.asked) - len(waited):,} of {len(state.asked):,} answered"
    parts = [element("h2", "This round"), meter(share, words)]
    if waited:
        names = [Markup(f"<li>{escape(site)} <span>{since(when)}</span></li>") for site, when in waited[:12]]
        more = f" and {len(waited) - 12:,} more" if len(waited) > 12 else ""
        parts += [
            Markup(f'<p class="lead">Waiting for{escape(more)}:</p><ul class="names">{join(names)}</ul>')
        ]
    if state.deadline is not None and state.round_began is not None:
        parts.append(
            Markup(
                f'<p class="quiet">Began {since(state.round_began)} ago; it ends after '
                f"{escape(duration(state.deadline))} at the latest.</p>"
            )
        )
    return join(parts)


def learning(state: RunState, spending: Spending) -> Markup:
    """Accuracy over rounds, and of each task after each task."""
    by_round = [(float(point.round), point.accuracy) for point in state.rounds]
    parts: list[str] = []
    if any(accuracy is not None for _, accuracy in by_round):
        skipped = [p.round for p in state.rounds if p.skipped][-100:]
        marks = [*_task_ends(state), *(AxisMark(float(n), "skipped", f"round {n}: skipped") for n in skipped)]
        newest = percent(state.accuracy)
        words = f"Accuracy on all classes seen so far, after each round, in percent; the newest is {newest}."
        curve = share_curve("accuracy", by_round)
        chart = share_chart([curve], by_round[0][0], by_round[-1][0], words, marks)
        parts.append(_figure("Accuracy after each round", words, chart))
    if len(state.learnt) > 1:
        lines = [
            share_curve(
                f"task {index + 1}", [(float(p.task), _at(p.accuracy, index)) for p in state.learnt[index:]]
            )
            for index in range(min(6, len(state.learnt)))
        ]
        words = "Accuracy on the classes of each task, in percent. A line that falls is forgetting."
        first, last = state.learnt[0].task, state.learnt[-1].task
        chart = share_chart(lines, first, last, words, unit="after task")
        parts.append(_figure("What is kept of each task", words, chart))
    if state.learnt:
        parts.append(_matrix(state))
    if not parts:
        return join([element("h2", "Learning"), element("p", "Nothing is measured yet.", "quiet")])
    return Markup(f'<h2>Learning</h2><div class="pair">{join(parts)}</div>')


def classes(state: RunState, spending: Spending) -> Markup:
    """Accuracy of each class, the most forgotten first."""
    if not state.learnt or not state.learnt[-1].classes:
        return Markup("")
    rows = []
    newest = state.learnt[-1].classes
    for label, now in enumerate(newest):
        column = [_at(point.classes, label) for point in state.learnt[:-1]]
        best = max((value for value in column if value is not None), default=None)
        lost = None if best is None or now is None else best - now
        name = state.class_names[label] if label < len(state.class_names) else f"class {label}"
        rows.append((name, now, lost))
    rows.sort(key=lambda row: -(row[2] if row[2] is not None else -math.inf))
    cells = [
        (name, meter(now or 0.0, percent(now)) if now is not None else MISSING, points(lost))
        for name, now, lost in rows
    ]
    columns, align = ("class", "accuracy now", "forgotten, points"), "lrr"
    parts = [element("h2", "Classes"), table(columns, cells[:CLASSES_SHOWN], align, "Accuracy of each class")]
    if len(cells) > CLASSES_SHOWN:
        rest = table(columns, cells[CLASSES_SHOWN:1000], align, "The other classes")
        words = f"{len(cells) - CLASSES_SHOWN} more classes"
        parts.append(Markup(f'<details id="more-classes"><summary>{words}</summary>{rest}</details>'))
    return join(parts)


def sites(state: RunState, spending: Spending, asked: SitesAsked = SitesAsked()) -> Markup:
    """Every site's state, those that need attention first."""
    everyone = state.sites()
    counts = Counter(site.status for site in everyone)
    found = [
        site
        for site in everyone
        if (not asked.text or asked.text.casefold() in site.name.casefold())
        and (not asked.state or site.status == asked.state)
    ]
    pages = max(1, math.ceil(len(found) / SITES_SHOWN))
    page = min(asked.page, pages)
    shown = found[(page - 1) * SITES_SHOWN : page * SITES_SHOWN]
    tally = "".join(
        f'<li><a href="?{urlencode({"state": status})}#sites-title">{pill(status, SITE_WORDS[status])} '
        f"{count:,}</a></li>"
        for status in SITE_ORDER
        if (count := counts[status])
    )
    weights = bool(state.weights)
    columns = ("site", "state", "since", "rounds", "dropped", "refused", "epsilon", "reason")
    align = "lllrrrrl"
    if weights:
        columns, align = (*columns[:6], "weight", *columns[6:]), "lllrrrrrl"
    rows = [_site_row(site, state, spending, weights) for site in shown]
    body = table(columns, rows, align, "Sites") if rows else Markup('<p class="quiet">No such site.</p>')
    return join([Markup(f'<ul class="tally">{tally}</ul>'), body, _pages(asked, page, pages, len(found))])


def privacy(state: RunState, spending: Spending) -> Markup:
    """Epsilon by site, the highest first."""
    if not spending.by_site:
        return Markup("")
    worst = max(spending.by_site.values())
    scale = worst if 0 < worst < math.inf else 1.0
    ranked = sorted(spending.by_site.items(), key=lambda item: -item[1])[:20]
    rows = [(site, meter(min(1.0, value / scale), _epsilon(value))) for site, value in ranked]
    words = (
        f"At most this much epsilon for one {spending.unit} at delta {power(spending.delta)}, over the "
        "releases that each site was asked for in this run. Each site's own ledger counts its whole life."
    )
    by_site = table(("site", "epsilon"), rows, "lr", "Epsilon by site")
    return join([element("h2", "Privacy spent"), element("p", words, "lead"), by_site])


def notes(state: RunState, spending: Spending) -> Markup:
    """The journal's newest events in words, the newest first."""
    if not state.notes:
        return Markup("")
    items = "".join(
        f"<li><span>{since(when)}</span> {escape(text)}</li>" for when, text in list(state.notes)[-20:][::-1]
    )
    return Markup(f'<h2>What was noted</h2><ol class="notes">{items}</ol>')


Panel = Callable[[RunState, Spending], Markup]
PANELS: dict[str, Panel] = {
    "headline": headline,
    "warnings": faults,
    "figures": figures,
    "waiting": waiting,
    "sites": sites,
    "learning": learning,
    "classes": classes,
    "privacy": privacy,
    "beside": lambda state, spending: beside_each_other(state.beside),
    "notes": notes,
}
"""In the order of the page."""


def _site_row(site: SiteNow, state: RunState, spending: Spending, weights: bool) -> Sequence[object]:
    name = site.name
    weight = [decimal(state.weights.get(name))] if weights else []
    return [
        name,
        pill(site.status, SITE_WORDS[site.status]),
        since(site.since) if site.since else "",
        f"{state.taken_part[name]:,}",
        f"{state.dropped[name]:,}",
        f"{state.refused[name]:,}",
        *weight,
        _epsilon(spending.by_site.get(name)),
        site.reason,
    ]


def _pages(asked: SitesAsked, page: int, pages: int, count: int) -> Markup:
    if pages == 1:
        return Markup("")

    def link(number: int, words: str) -> str:
        query = urlencode({"site": asked.text, "state": asked.state, "page": number})
        return f'<a href="?{escape(query)}#sites-title">{words}</a>'

    before = link(page - 1, "before") if page > 1 else ""
    after = link(page + 1, "next") if page < pages else ""
    return Markup(
        f'<p class="pages">{before} <span>page {page} of {pages}, {plural(count, "site")}</span> {after}</p>'
    )


def _matrix(state: RunState) -> Markup:
    rows = [
        (
            f"after task {point.task}",
            *(percent(_at(point.accuracy, index)) for index in range(len(state.learnt))),
        )
        for point in state.learnt[-12:]
    ]
    if forgotten := state.forgetting():
        lost = (points(_at(forgotten, index)) for index in range(len(state.learnt)))
        rows.append(("forgotten, points", *lost))
    columns = ("", *(f"task {index + 1}" for index in range(len(state.learnt))))
    numbers = table(columns, rows, "l" + "r" * len(state.learnt), "Accuracy and forgetting of each task")
    return Markup(
        f'<details id="matrix"><summary>The numbers and the forgetting</summary>{numbers}</details>'
    )


def _task_ends(state: RunState) -> list[AxisMark]:
    last = {point.task: point.round for point in state.rounds}
    ended = sorted(last.items())[:-1][-30:]
    return [AxisMark(float(number), "task", f"task {task} ends") for task, number in ended]


def _figure(title: str, words: str, chart: Markup) -> Markup:
    return Markup(
        f"<figure><figcaption><h3>{escape(title)}</h3><p>{escape(words)}</p></figcaption>{chart}</figure>"
    )


def _at(values: Sequence[float | None], index: int) -> float | None:
    return values[index] if index < len(values) else None


def _epsilon(value: float | None) -> str:
    if value is None:
        return MISSING
    return "∞" if math.isinf(value) else decimal(value)
