"""Finds the present faults in the SuperLink's status, in run folders, and in a site's own files.

What each is called, whose turn it is and which command ends it stands in `server/faults.py`.
"""

import math
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from perennial.config.experiment import load_experiment
from perennial.deploy.superlink import SuperLinkStatus
from perennial.foundation.errors import PerennialError, StateError
from perennial.live.run_state import RunState
from perennial.server.faults import (
    Fault,
    format_sentence,
    of_answer,
    of_learning,
    of_ledger,
    of_marks,
    rank_faults,
)
from perennial.server.measures.record import Measures, drop_classes_of_few, read_measures
from perennial.server.stopped import suggest_settings

if TYPE_CHECKING:
    from perennial.live.site_state import HospitalState

LOW_BELOW = 0.05
"""Share of a disk that is free, below which the next checkpoint may fail ..."""
AMPLE = 5e9
"""... and bytes that are enough on a disk of any size: a twentieth of a large one is no cause for alarm."""
FULL_BELOW = 50e6
"""Bytes free on a disk that counts as full."""
LONG_WAIT = 3.0
"""Times the usual length of a round after which an answer counts as late."""
DAY = 86_400.0
SOON = 30.0
"""Days before a certificate's end at which a person is told."""
NEARLY = 0.8
"""Share of a budget that is spent when it counts as nearly spent."""


def find_faults(superlink: SuperLinkStatus | None, runs: Iterable[RunState]) -> list[Fault]:
    """Every present fault of the SuperLink and of runs that an operator may know of, the gravest first."""
    found = list(of_superlink(superlink)) if superlink is not None else []
    for state in runs:
        found += of_run(state)
    return rank_faults(found)


def of_superlink(superlink: SuperLinkStatus) -> Iterator[Fault]:
    """Yield the faults of the SuperLink itself and of the operator's record of sites."""
    ends = superlink.certificate_ends
    if ends < time.time():
        yield Fault("certificate_expired", since=ends)
    elif superlink.certificate_waits:
        yield Fault("certificate_waits")
    elif ends - time.time() < SOON * DAY:
        yield Fault("certificate_ends")
    for site, state in superlink.others.items():
        if state == "added":
            yield Fault("unregistered", site)
    if not superlink.alive:
        since = time.time() - superlink.silent_for
        yield Fault("superlink", since=since if math.isfinite(since) else None)
        return
    for run, status in superlink.unknown.items():
        yield Fault("unknown_run", key=run, detail=f"It is {status}.")
    for site, since in superlink.sites.items():
        if since is not None:
            yield Fault("silent", site, since=since or None)


def of_run(state: RunState) -> Iterator[Fault]:
    """Yield the faults of one run: its process, late or failed sites, and what the model has learnt."""
    run, status, deployed = state.name, state.status, state.engine == "grpc"
    if status in ("silent", "ended"):
        logged = f"Its log says why: perennial deploy logs {run}." if deployed else "It ended with an error."
        detail, since = (logged, None) if state.silent_for is None else ("", time.time() - state.silent_for)
        yield Fault("serverapp", "", run, detail, since, deployed)
    if status == "stopped" or (status == "paused" and not state.rests):
        yield Fault(status, run=run, deployed=deployed)
    skipped = bool(state.rounds) and state.rounds[-1].skipped and state.rounds[-1].round >= state.round
    if status == "waiting" or (status == "paused" and state.rests):
        too_few = skipped or (status == "paused" and state.refusing)
        yield Fault("quorum" if too_few else "waiting", run=run, detail=format_sentence(state.pause))
    if status not in ("finished", "stopped"):
        of_sites = list(_of_sites(state))
        yield from of_sites
        answers = {fault.kind for fault in of_sites if fault.kind not in ("silent", "revoked")}
        if skipped and not state.rounds[-1].sites and answers == {"invalid"}:
            yield Fault("all_dropped", run=run)
        elif skipped and status == "running":
            yield Fault("quorum", run=run)
        if (full := _is_disk_full(state.folder)) is not None:
            yield Fault("disk_full" if full else "disk_low", run=run if full else "", deployed=deployed)
    yield from of_marks(run, state.marks)
    newest = state.learnt[-1] if state.learnt else None
    classes = dict(zip(state.class_names, newest.classes, strict=False)) if newest else {}
    by_round = [point.accuracy for point in state.rounds if point.task == state.task]
    signs = newest.signs if newest else []
    if 0.0 in classes.values():
        classes = drop_classes_of_few(classes, _try_reading_measures(state.folder))
    yield from of_learning(
        run, signs, lambda: _list_tries(state.folder), by_round, classes, state.worst_forgetting
    )
    if state.damaged:
        yield Fault("journal", run=run)


def _list_tries(run: Path) -> list[str]:
    """Settings that may help where learning has stopped."""
    try:
        return suggest_settings(load_experiment(run / "experiment.yaml"))
    except (PerennialError, OSError):
        return ["see docs/which_method.md"]


def _try_reading_measures(run: Path) -> Measures | None:
    """The latest measures of a run; None where they cannot be read."""
    with suppress(StateError):
        return read_measures(run)
    return None


def _of_sites(state: RunState) -> Iterator[Fault]:
    """Of the sites of a run that is not over."""
    others = state.superlink.others if state.superlink is not None else {}
    known, run = state.site_names(), state.name
    revoked = {site for site in known if others.get(site) == "revoked"}
    yield from (Fault("revoked", site) for site in revoked)
    away = set[str]() if state.is_over else state.missing | state.offline
    gone = (away | state.silent) - revoked
    yield from (Fault("silent", site) for site in gone)
    reasons = {site: reason for site, (reason, _, _) in state.last_faults.items()} | state.refusing
    for site, reason in reasons.items():
        fault = of_answer(site, run, reason)
        # the SuperLink answers with an error for a site that is gone
        if site not in revoked and not (fault.kind == "failed" and site in gone):
            yield fault
    for site in state.absent - gone - revoked - reasons.keys() - state.answered.keys():
        yield Fault("deadline", site, run)
    usual = sorted(point.seconds for point in state.rounds[-10:] if not point.skipped)
    if usual and state.status == "running":
        limit = max(60.0, LONG_WAIT * usual[len(usual) // 2])
        for site, since in state.waited_for.items():
            if time.time() - since > limit and site not in gone:
                yield Fault("late", site, run, since=since)


def _is_disk_full(folder: Path) -> bool | None:
    """Whether the disk of a folder is full; None where there is room, or where nobody can tell."""
    try:
        disk = shutil.disk_usage(folder)
    except OSError:
        return None
    return disk.free < FULL_BELOW if disk.free < min(LOW_BELOW * disk.total, AMPLE) else None


def of_site(state: "HospitalState") -> list[Fault]:
    """What a hospital has to decide or mend at its own site, the gravest first."""
    return rank_faults(_of_site(state))


def _of_site(state: "HospitalState") -> Iterator[Fault]:
    from perennial.live.site_state import describe_left

    site = state.config.site
    for problem in state.problems:
        yield Fault("settings", site, detail=format_sentence(problem))
    if state.ledger_problem:
        yield of_ledger(site, state.ledger_problem) or Fault("settings", site, detail=state.ledger_problem)
    if not state.alive:
        yield Fault("silent", site)
        if state.port_taken:
            yield Fault("site_port", site)
    if state.obstacle:
        yield _explain_silence(site, state)
    elif state.alive and not state.connected:
        yield Fault("unanswered", site, since=_last_answer(state))
    _, share = describe_left(state.epsilon, state.limit)
    if state.limit is not None and state.epsilon is not None and share >= NEARLY:
        yield Fault("budget" if share >= 1 else "budget_low", site)
    if state.consent.paused:
        yield Fault("site_paused", site)
    if (full := _is_disk_full(state.config.state_dir)) is not None:
        yield Fault("site_disk_full" if full else "site_disk_low", site)
    approved = any(approval.bundle.startswith(state.unapproved) for approval in state.approvals)
    if state.unapproved and not approved:
        yield Fault("not_approved", site)
    if state.offered:
        names = ", ".join(offer.name for offer in state.offered)
        yield Fault("offer", site, detail=f"{names}.", key=names)
    for one in state.list_newest():
        if one.ended in ("refused", "failed"):
            fault = of_answer(site, "", one.reason, here=True)
            if fault.kind != "site_paused" or state.consent.paused:
                yield fault


def _explain_silence(site: str, state: "HospitalState") -> Fault:
    """Why the SuperLink does not answer, as far as this machine can tell."""
    from perennial.deploy.handshake import (
        CERTIFICATE_EXPIRED,
        CLOCK,
        CONNECTED,
        REVOKED,
        SET_CLOCK,
        UNREGISTERED,
    )

    words = state.obstacle
    known = {
        UNREGISTERED: "unregistered",
        REVOKED: "revoked",
        CONNECTED: "key_in_use",
        CLOCK: "clock",
        SET_CLOCK: "clock",
        CERTIFICATE_EXPIRED: "certificate_expired",
    }
    kind = next((kind for reason, kind in known.items() if reason in words), "")
    if kind:
        return Fault(kind, "" if kind == "certificate_expired" else site)
    kind = "network" if state.unreachable else "not_let_in"
    return Fault(kind, site, detail=format_sentence(words), since=_last_answer(state))


def _last_answer(state: "HospitalState") -> float | None:
    return None if state.answered is None else time.time() - state.answered
