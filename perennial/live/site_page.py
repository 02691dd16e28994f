"""The page of one hospital, in panels: what needs it, what has left, what it has approved."""

import math
import time
from collections import Counter

from perennial.config.approval import Approval, experiment_of
from perennial.deploy.approval import read_offer
from perennial.deploy.review import asked_in_words, offer_in_words
from perennial.foundation.errors import PerennialError
from perennial.live.charts import meter
from perennial.live.diagnosis import NEARLY, of_site
from perennial.live.markup import cards, faults_in_words, heading, pill, short_time, since
from perennial.live.site_state import HospitalState, left_in_words
from perennial.live.tail import plain
from perennial.server.report.markup import MISSING, Markup, element, escape, join, plural, size, table

SHOWN = 50


def headline(state: HospitalState) -> Markup:
    """The site's name and status, and what it does now."""
    if state.consent.paused:
        status, words = "paused", "paused"
    elif not state.alive:
        status, words = "silent", "SuperNode does not run"
    elif state.connected:
        status, words = "running", "connected"
    else:
        status, words = "waiting", "the SuperLink does not answer"
    return heading(status, words, state.config.site, story(state))


def story(state: HospitalState) -> Markup:
    """A sentence on the request that the site answers, or on the last one."""
    if (now := state.now) is not None:
        what = f"Answering {now.kind} of {now.name or now.run[:12]}, round {now.round}, since "
        return Markup(f"{escape(what)}{since(now.began)}.")
    last = next((one for one in reversed(state.asked) if one.ended), None)
    if last is None:
        return Markup("Nothing has been asked yet.")
    return Markup(f"Idle. The last request was {escape(last.ended)} {since(last.until)} ago.")


def warnings(state: HospitalState) -> Markup:
    """What the hospital has to decide or mend."""
    return faults_in_words(of_site(state))


def figures(state: HospitalState) -> Markup:
    """The most important numbers: epsilon spent and left, the dearest record, requests of a day."""
    words, share = left_in_words(state.epsilon, state.limit)
    unit = state.config.policy.unit or "the largest unit that every release hides"
    answered = sum(one.ended == "answered" and time.time() - one.began < 86400 for one in state.asked)
    left = None if state.limit is None or state.epsilon is None else max(0.0, state.limit - state.epsilon)
    entries = [
        ("epsilon spent", _number(state.epsilon), f"in this site's life, for one {unit}"),
        ("left", _number(left), MISSING if state.limit is None else f"of {state.limit:g}"),
        ("dearest record", *_of_records(state)),
        ("releases", f"{len(state.releases):,}", "lines of the ledger"),
        ("answered", f"{answered:,}", "requests in a day"),
        ("approved", f"{len(state.approvals):,}", "experiments"),
        ("waiting", f"{len(state.offered):,}", "offers to decide on"),
    ]
    bar = meter(share, words, "high" if share >= NEARLY else "")
    return Markup(f'{cards(entries)}<p class="budget">{bar}</p>')


def released(state: HospitalState) -> Markup:
    """Everything that has left this building, line by line, the newest first."""
    parts: list[str] = [element("h2", "What has left this building")]
    if not state.releases:
        return join([*parts, element("p", "Nothing.", "calm")])
    kinds = Counter(release.kind for release in state.releases)
    tally = ", ".join(plural(count, kind) for kind, count in kinds.most_common())
    rows = [
        (
            release.time.replace("T", " ").replace("+00:00", ""),
            state.names.get(release.run) or state.names.get(release.experiment) or release.run[:12],
            release.kind,
            release.words,
            release.unit,
        )
        for release in reversed(state.releases[-SHOWN:])
    ]
    columns = ("time, UTC", "run", "what", "protected by", "hides one")
    parts += [
        element("p", f"{tally}. Each line was on the disk before its release left.", "lead"),
        table(columns, rows, "lllll", "Releases"),
    ]
    if len(state.releases) > SHOWN:
        more = f"{len(state.releases) - SHOWN:,} older ones: perennial ledger {state.config.state_dir}"
        parts.append(element("p", more, "quiet"))
    return join(parts)


def approved(state: HospitalState) -> Markup:
    """Every approved experiment and every offer, with what each asks for."""
    parts: list[str] = []
    for offer in state.offered:
        parts.append(
            Markup(
                f'<div class="card-box"><h3>{escape(offer.name)} {pill("offered", "to be decided")}</h3>'
                f"{_asked(state, offer.name)}<p>If you agree: <code>perennial site approve "
                f"offered/{escape(offer.name)} SHA256</code>, with the SHA-256 that the operator told you by "
                "telephone.</p></div>"
            )
        )
    for _app, approvals in _by_app(state.approvals).items():
        names = ", ".join(str(one.settings.get("name", "unnamed")) for one in approvals)
        words = "".join(f"<li>{escape(line)}</li>" for one in approvals for line in _approval_in_words(one))
        asks = "".join(_asks(state, one) for one in approvals)
        title = f"<h3>{escape(names)} {pill('approved', 'approved')}</h3>"
        box = f'<div class="card-box">{title}<ul>{words}</ul>{asks}</div>'
        parts.append(Markup(box))
    if not parts:
        parts.append(element("p", "No experiment is approved here, so nothing can run.", "quiet"))
    return join([element("h2", "Experiments"), *parts])


def runs(state: HospitalState) -> Markup:
    """What is stored of each run, and from which this site has withdrawn."""
    rows = []
    for kept in state.kept[:SHOWN]:
        rows.append(
            (state.names.get(kept.run, kept.run[:12]), size(kept.bytes), since(kept.newest), kept.run)
        )
    for run, when in list(state.consent.withdrawn.items())[-SHOWN:]:
        rows.append((state.names.get(run, run[:12]), "nothing", when[:10], pill("refused", "withdrawn")))
    if not rows:
        return Markup("")
    return join(
        [element("h2", "Runs"), table(("run", "kept here", "last used", "token"), rows, "lrll", "Runs")]
    )


def requests(state: HospitalState) -> Markup:
    """The newest requests and how they ended."""
    rows = []
    for one in list(state.asked)[-20:][::-1]:
        status = {"": "training", "answered": "answered"}.get(one.ended, one.ended)
        words = one.ended or "working"
        took = short_time(one.until - one.began) if one.until else MISSING
        name, began = one.name or one.run[:12], since(one.began)
        rows.append((name, one.kind, one.round, began, pill(status, words), took, one.reason))
    if not rows:
        return Markup("")
    columns = ("run", "request", "round", "since", "state", "took", "reason")
    return join([element("h2", "Requests"), table(columns, rows, "llrllrl", "Requests")])


PANELS = {
    "headline": headline,
    "warnings": warnings,
    "figures": figures,
    "approved": approved,
    "released": released,
    "runs": runs,
    "requests": requests,
}
"""In the order of the page."""

_ASKED: dict[tuple[str, float, str], Markup] = {}
_ASKS: dict[tuple[str, str], Markup] = {}


def _asked(state: HospitalState, name: str) -> Markup:
    """What an offered app asks, as `perennial site review` says it; kept, because reading takes a while."""
    path = state.folder / "offered" / name
    try:
        key = name, path.stat().st_mtime, str(state.config)
        if key not in _ASKED:
            earlier = next((found for found in reversed(state.approvals) if found.experiment), None)
            lines = offer_in_words(read_offer(path, state.config), state.config, earlier)
            text = "\n".join(plain(line, 2000) for line in lines)
            _ASKED.clear()
            _ASKED[key] = Markup(f"<pre>{escape(text)}</pre>")
        return _ASKED[key]
    except (PerennialError, OSError) as error:
        return element("p", plain(str(error)), "fault")


def _asks(state: HospitalState, approval: Approval) -> Markup:
    """What an approved experiment asks, behind a line that opens it."""
    key = approval.name, str(state.config.policy)
    if key not in _ASKS:
        try:
            experiment = experiment_of(approval, state.config.approvals, state.config.plugins)
            lines = [plain(line, 2000) for line in asked_in_words(experiment, state.config.policy, approval)]
        except (PerennialError, ValueError) as error:
            lines = [plain(str(error))]
        if len(_ASKS) > SHOWN:
            _ASKS.clear()
        _ASKS[key] = escape("\n".join(lines))
    text = _ASKS[key]
    return Markup(
        f'<details id="asks-{escape(approval.experiment[:16])}"><summary>What it asks</summary>'
        f"<pre>{text}</pre></details>"
    )


def _approval_in_words(approval: Approval) -> list[str]:
    privacy = approval.settings.get("privacy")
    mode = privacy.get("mode", "none") if isinstance(privacy, dict) else "none"
    return [
        f"protection: privacy.mode {mode}",
        f"approved {approval.time[:16].replace('T', ' ')} UTC",
        f"settings {approval.experiment[:16]}…, app {approval.bundle[:16]}…",
    ]


def _by_app(approvals: list[Approval]) -> dict[str, list[Approval]]:
    found: dict[str, list[Approval]] = {}
    for approval in approvals:
        found.setdefault(approval.app, []).append(approval)
    return found


def _of_records(state: HospitalState) -> tuple[str, str]:
    """(epsilon of the record that paid most, a note), which only this page and `perennial ledger` tell."""
    records = state.records
    if records is None:
        return MISSING, "no release has named its records"
    spent = "" if records.spent is None else f", {records.spent:,} are spent"
    return (
        _number(records.dearest.epsilon),
        f"median {_number(records.median.epsilon)} of {records.records:,} records{spent}",
    )


def _number(value: float | None) -> str:
    if value is None:
        return MISSING
    return "∞" if math.isinf(value) else f"{value:.3g}"
