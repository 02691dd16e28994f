"""Warnings about a run for its operator, each with what to do about it."""

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from perennial.deploy.superlink_status import SuperLinkStatus
from perennial.live.run_state import RunState
from perennial.server.report.markup import Markup, duration, escape, plural
from perennial.strategies.round.queries import NOT_APPROVED

Grade = Literal["critical", "warning"]
FULL_BELOW = 0.05
"""Share of a disk that is free, below which the next checkpoint may fail ..."""
AMPLE = 5e9
"""... and bytes that are enough on a disk of any size: a twentieth of a large one is no cause for alarm."""
LONG_WAIT = 3.0
"""Times the usual length of a round after which an answer counts as late."""
SHOWN = 6
DAY = 86_400.0
SOON = 30.0
"""Days before a certificate's end at which a person is told."""


@dataclass(frozen=True)
class Warned:
    """One sentence for the operator. kind: a word that stays the same while the cause does."""

    kind: str
    grade: Grade
    text: str
    remedy: str = ""


def warnings_of(state: RunState) -> list[Warned]:
    """Those of a run, the gravest first."""
    found = list(_warnings(state))
    return sorted(found, key=lambda warned: warned.grade != "critical")


def superlink_warnings(superlink: SuperLinkStatus) -> Iterator[Warned]:
    """Those of the SuperLink itself, whatever the runs do."""
    if not superlink.alive:
        yield Warned(
            "superlink",
            "critical",
            f"The SuperLink gives no sign of life since {duration(superlink.silent_for)}: no site is served.",
            "Look at its log and start it: docker compose up -d superlink, or perennial deploy start.",
        )
    days = (superlink.certificate_ends - time.time()) / DAY
    if days < SOON:
        when = f"expires in {plural(int(days), 'day')}" if days > 0 else "has expired: no site gets in again"
        yield Warned(
            "certificate",
            "critical" if days <= 0 else "warning",
            f"The SuperLink's certificate {when}.",
            "perennial deploy rotate, then restart the SuperLink.",
        )


def site_warnings(superlink: SuperLinkStatus) -> Iterator[Warned]:
    """Of registered sites that are not connected or give no sign of life."""
    gone = sorted(name for name, since in superlink.sites.items() if since is not None)
    if superlink.alive and gone:
        yield _not_connected(gone)


def warned_markup(found: list[Warned]) -> Markup:
    """Warnings as a list, or one line that says that there are none."""
    if not found:
        return Markup('<p class="calm">Nothing needs attention.</p>')
    items = "".join(
        f'<li class="{warned.grade}"><strong>{escape(warned.text)}</strong> {escape(warned.remedy)}</li>'
        for warned in found
    )
    return Markup(f'<h2 class="unseen">Needs attention</h2><ul class="warnings">{items}</ul>')


def _warnings(state: RunState) -> Iterator[Warned]:
    status = state.status
    if state.superlink is not None and status not in ("finished", "stopped"):
        yield from superlink_warnings(state.superlink)
    if status == "silent":
        silence = duration(state.silent_for or 0)
        yield Warned(
            "silent",
            "critical",
            f"The run's process gives no sign of life since {silence}: it was killed or stopped, or its "
            "machine froze.",
            "Look at the SuperLink's log, then go on with: perennial deploy resume " + state.name,
        )
    if status == "ended":
        yield Warned(
            "ended",
            "critical",
            "The run ended before its last round, with an error.",
            f"perennial deploy logs {state.name} says which; perennial deploy resume {state.name} goes on.",
        )
    if status in ("paused", "waiting"):
        yield Warned("pause", "warning", f"{state.pause[:1].upper()}{state.pause[1:]}.", _pause_remedy(state))
    yield from _of_sites(state)
    if state.skipped:
        last = [point.round for point in state.rounds if point.skipped][-SHOWN:]
        yield Warned(
            "skipped",
            "warning",
            f"{plural(state.skipped, 'round')} without enough valid answers, the last: "
            f"{', '.join(map(str, last))}.",
            "rounds.quorum of the experiment says how many answers a round needs.",
        )
    yield from _of_classes(state)
    if state.damaged:
        yield Warned(
            "journal", "warning", f"{plural(state.damaged, 'line')} of the journal cannot be read.", ""
        )
    try:
        disk = shutil.disk_usage(state.folder)
    except OSError:
        return
    if disk.free < min(FULL_BELOW * disk.total, AMPLE) and status != "finished":
        yield Warned(
            "disk",
            "critical",
            f"The disk that holds the run is nearly full: {disk.free / 1e9:.1f} GB are free.",
            "Free some; a run that could not write its checkpoint ends, and resumes when there is room.",
        )


def _of_classes(state: RunState) -> Iterator[Warned]:
    """Of classes that the newest model recognises in no sample."""
    found = state.learnt[-1].classes if state.learnt else []
    never = [name for name, share in zip(state.class_names, found, strict=False) if share == 0.0]
    if never:
        yield Warned(
            "unrecognised",
            "warning",
            f"{len(never)} of {plural(len(found), 'class')} recognised in no sample: {_named(never)}.",
            "docs/which_method.md says what keeps earlier classes; the notes say if learning has stopped.",
        )


def _pause_remedy(state: RunState) -> str:
    if state.refusing:
        return (
            f"It tries again by itself; it goes on when {_named(sorted(state.refusing))} answers, or with "
            "a lower rounds.quorum. Ask the hospital: its page says what it refuses and why."
        )
    if state.pause_kind == "waiting" or state.missing:
        return "It goes on by itself when enough sites are connected."
    return "Resume it here, or with: perennial deploy resume " + state.name


def _of_sites(state: RunState) -> Iterator[Warned]:
    if state.status in ("finished", "stopped"):
        return
    refused: dict[str, list[str]] = {}
    failed: dict[str, list[str]] = {}
    for site, (reason, said_no, _) in state.last_faults.items():
        (refused if said_no else failed).setdefault(reason, []).append(site)
    for kind, word, groups in (("refused", "refused", refused), ("failed", "failed", failed)):
        for reason, sites in list(groups.items())[:SHOWN]:
            yield Warned(
                kind, "warning", f"{_named(sites)} {word}: {reason.rstrip('.')}.", _remedy(kind, reason)
            )
        if len(groups) > SHOWN:
            yield Warned(
                kind, "warning", f"{plural(len(groups) - SHOWN, 'other reason')}; see the sites below."
            )
    if gone := state.missing | state.silent | state.offline:
        yield _not_connected(sorted(gone))
    usual = sorted(point.seconds for point in state.rounds[-10:] if not point.skipped)
    if usual and state.status == "running":
        limit = max(60.0, LONG_WAIT * usual[len(usual) // 2])
        late = [site for site, since in state.waited_for.items() if time.time() - since > limit]
        if late:
            yield Warned(
                "late",
                "warning",
                f"{_named(late)} {'has' if len(late) == 1 else 'have'} not answered for more than "
                f"{duration(limit)}.",
                "The round goes on without those that miss its deadline.",
            )


def _remedy(kind: str, reason: str) -> str:
    """What to do about a site's refusal (its reason begins with what refused) or failure."""
    if reason == NOT_APPROVED:
        return "At the site: perennial site review, then perennial site approve."
    if kind == "failed":
        return "At the site: the SuperNode's log says more, and perennial site check what is wrong now."
    match reason.partition(":")[0]:
        case "policy" | "privacy":
            return "The hospital decides: site.yaml and its page say what it answers."
        case "state" | "data" | "error":
            return "At the site: its log says more; often its disk is full or its data moved."
        case "config" | "protocol":
            return "At the site: perennial site check; is the app that it approved the one that runs?"
    return "At the site: its page and its log say more."


def _not_connected(sites: list[str]) -> Warned:
    verb = "is" if len(sites) == 1 else "are"
    remedy = "At the site: perennial site check says why."
    return Warned("offline", "warning", f"{_named(sites)} {verb} not connected.", remedy)


def _named(sites: list[str]) -> str:
    shown = ", ".join(sites[:SHOWN])
    return f"{shown} and {len(sites) - SHOWN} more" if len(sites) > SHOWN else shown
