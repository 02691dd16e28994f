"""Warnings about a run for its operator, each with what to do about it."""

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from perennial.live.run_state import RunState
from perennial.server.report.markup import duration, plural

Grade = Literal["critical", "warning"]
FULL_BELOW = 0.05
"""Share of a disk that is free, below which the next checkpoint may fail."""
LONG_WAIT = 3.0
"""Times the usual length of a round after which an answer counts as late."""
SHOWN = 6


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


def _warnings(state: RunState) -> Iterator[Warned]:
    status = state.status
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
            f"{plural(state.skipped, 'round')} skipped for lack of valid answers, the last: "
            f"{', '.join(map(str, last))}.",
            "rounds.quorum of the experiment says how many answers a round needs.",
        )
    if state.damaged:
        yield Warned(
            "journal", "warning", f"{plural(state.damaged, 'line')} of the journal cannot be read.", ""
        )
    try:
        disk = shutil.disk_usage(state.folder)
    except OSError:
        return
    if disk.free < FULL_BELOW * disk.total and status != "finished":
        yield Warned(
            "disk",
            "critical",
            f"The disk that holds the run is nearly full: {disk.free / 1e9:.1f} GB are free.",
            "Free some; a run that could not write its checkpoint ends, and resumes when there is room.",
        )


def _pause_remedy(state: RunState) -> str:
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
            yield Warned(kind, "warning", f"{_named(sites)} {word}: {reason}.")
        if len(groups) > SHOWN:
            yield Warned(
                kind, "warning", f"{plural(len(groups) - SHOWN, 'other reason')}; see the sites below."
            )
    if state.missing:
        yield Warned(
            "offline",
            "warning",
            f"{_named(sorted(state.missing))} {'is' if len(state.missing) == 1 else 'are'} not connected.",
            "At the site: perennial site check says why.",
        )
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


def _named(sites: list[str]) -> str:
    shown = ", ".join(sites[:SHOWN])
    return f"{shown} and {len(sites) - SHOWN} more" if len(sites) > SHOWN else shown
