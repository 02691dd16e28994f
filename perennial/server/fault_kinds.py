"""Every kind of fault: one sentence, one owner, one command that ends it, and the surfaces that may name it.

A site's own disk, ledger and log are named at that site alone; the operator is told to ask the hospital.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, cast

Grade = Literal["critical", "warning"]
Owner = Literal["operator", "hospital", "network", "nobody"]
SURFACES = {
    "p": "operator's pages, /metrics",
    "s": "perennial deploy status",
    "r": "report",
    "h": "hospital's page, /metrics",
}
"""Where a fault is named, by the letters of `Kind.seen`."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault. seen: letters of SURFACES. cause, command: texts with {site}, {run} and others."""

    cause: str
    owner: Owner
    command: str
    seen: str
    grade: Grade


_KINDS = """
superlink: critical, operator, ps
    The SuperLink gives no sign of life: no site is served.
    perennial deploy start (containers: docker compose up -d superlink)
unknown_run: critical, operator, ps
    Flower's run {key} goes on, and no folder here names it.
    perennial deploy stop {key}
superexec: critical, operator, s
    Run {run} is submitted, and no process begins it.
    restart the SuperLink: perennial deploy start (containers: docker compose up -d superlink)
serverapp: critical, operator, ps
    The process of run {run} has ended before the last round.
    {resume}
pages: warning, operator, s
    The operator's pages give no sign of life.
    perennial serve state/runs (containers: docker compose up -d pages)
superlink_port: warning, operator, s
    Another program has a port of the SuperLink.
    end that program, or change the port in deploy.yaml; then perennial deploy start
certificate_expired: critical, operator, psh
    The SuperLink's certificate has expired: no site gets in again.
    perennial deploy rotate, then restart the SuperLink
certificate_ends: warning, operator, ps
    The SuperLink's certificate expires within 30 days.
    perennial deploy rotate, then restart the SuperLink
disk_full: critical, operator, ps
    The disk that holds the runs is full.
    free some of it, then {resume}
disk_low: critical, operator, ps
    The disk that holds the runs is nearly full.
    move finished runs to another disk
paused: warning, operator, ps
    Run {run} is paused by the operator.
    {resume}
stopped: warning, operator, ps
    Run {run} was stopped by the operator.
    {resume}
waiting: warning, nobody, ps
    Run {run} waits until enough sites take part.
    it goes on by itself when they do
quorum: warning, nobody, ps
    Fewer sites answer run {run} than rounds.quorum.
    it tries again by itself, and goes on when the sites named here answer
all_dropped: critical, operator, ps
    The server took no reply to the last round of run {run}.
    perennial deploy logs {run}; stop it, mend what the sites' reasons name, and submit it again
not_approved: warning, hospital, psh
    The app of this run is not approved at {site}.
    perennial site review FAB, then perennial site approve FAB SHA-256
other_code: warning, hospital, psh
    Another experiment than this run's is approved at {site}.
    perennial site approve FAB SHA-256, with the app of this run
version: warning, hospital, psh
    Another version of Perennial runs at {site} than at the server.
    install the server's version (perennial --version), then restart the SuperNode
wrong_name: warning, hospital, ps
    The SuperNode of {site} says a name that its key is not registered for.
    write the registered name under site in site.yaml, then restart the SuperNode
revoked: warning, hospital, psh
    The key of {site} is revoked.
    move node.key away and make a new one: perennial site open; the operator: add-site {site} node.key.pub
unregistered: warning, operator, psh
    The key of {site} is not registered at the SuperLink.
    perennial deploy add-site {site} node.key.pub
silent: warning, hospital, psh
    No sign of life of the SuperNode of {site}.
    perennial site check, then perennial site start
deadline: warning, hospital, ps
    No answer of {site} by the deadline of the last round.
    ask the hospital: perennial site check
late: warning, hospital, ps
    The round waits for {site}, for over three times its usual length.
    ask the hospital: perennial site check
policy: warning, hospital, psh
    The policy of {site} refuses a request.
    change {key} of site.yaml there, or what the experiment asks
site_paused: warning, hospital, psh
    The hospital has paused {site}.
    perennial site resume
withdrawn: warning, nobody, psh
    The hospital has withdrawn {site} from this run, for good.
    the run goes on without it; rounds.quorum may have to be lower
budget: warning, hospital, psh
    The lifetime budget of {site} is spent.
    raise policy.max_epsilon of site.yaml, which only the hospital may
budget_low: warning, hospital, h
    Four fifths of the lifetime budget of {site} are spent.
    raise policy.max_epsilon of site.yaml, which only the hospital may
spending: warning, operator, p
    {site} has spent four fifths of the epsilon that --budget names, in run {run}.
    perennial deploy pause {run}, and ask the hospital what its budget leaves
own_reason: warning, hospital, ps
    {site} does not answer, for a reason that stays in its own log.
    ask the hospital: perennial site check
failed: warning, hospital, ps
    An error at {site} or on the way, in place of an answer.
    ask the hospital: perennial site check
invalid: warning, operator, ps
    A reply of {site} was not valid, and the server left it out.
    perennial deploy logs {run}, and ask the hospital
contradicting: warning, operator, psr
    What {site} sends differs from the other sites'.
    ask the hospital; a mark has no cause, and another camera is enough
collapsed: critical, operator, psr
    The model of run {run} does not tell classes apart.
    a new run with another setting: {key}
unrecognised: warning, operator, psr
    Classes of run {run} are recognised in no sample.
    a new run with a strategy that keeps earlier classes (docs/which_method.md)
forgetting: warning, operator, psr
    Run {run} has forgotten over 30 points of a task.
    a new run with a strategy that keeps earlier classes (docs/which_method.md)
journal: warning, nobody, ps
    Lines of the journal of run {run} cannot be read.
    the checkpoints are whole; what stood in them is missing on pages and in the report
offer: warning, hospital, h
    An app waits at {site} for a decision.
    perennial site review FAB, then approve or refuse it on the page
settings: critical, hospital, h
    A file of {site} cannot be read, so that nothing is answered.
    perennial site check
ledger_unreadable: critical, hospital, h
    The ledger of {site} cannot be read, so that nothing leaves.
    put state/ledger.jsonl back from a backup, or perennial site restart-ledger
ledger_behind: critical, hospital, h
    The ledger of {site} is behind its tip, so that nothing leaves.
    put back a newer ledger, or perennial site restart-ledger
site_disk_full: critical, hospital, h
    The disk of {site} is full.
    perennial site clean
site_disk_low: warning, hospital, h
    The disk of {site} is nearly full.
    perennial site clean
site_error: warning, hospital, h
    {site} cannot answer.
    perennial site check
site_port: warning, hospital, h
    Another program has a port of the SuperNode of {site}.
    end that program, or change connection.runtime_port of site.yaml; then perennial site start
network: warning, network, h
    {site} does not reach the SuperLink.
    perennial site check, which says what does not get through
clock: warning, hospital, h
    The clocks of {site} and of the SuperLink differ.
    set the clock, then perennial site start
key_in_use: critical, hospital, h
    Another SuperNode is connected with the key of {site}.
    stop it; where nobody knows of one, ask the operator for perennial deploy revoke {site}
not_let_in: warning, hospital, h
    The SuperLink does not let {site} in.
    perennial site check
unanswered: warning, hospital, h
    The SuperLink has stopped answering the SuperNode of {site}.
    restart the SuperNode: perennial site start
"""
"""Name: grade, owner, surfaces; then the sentence; then the command."""


def _kinds() -> Iterator[tuple[str, Kind]]:
    lines = _KINDS.strip().splitlines()
    for head, cause, command in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        name, _, facts = head.partition(": ")
        grade, owner, seen = facts.split(", ")
        yield name, Kind(cause.strip(), cast(Owner, owner), command.strip(), seen, cast(Grade, grade))


KINDS = dict(_kinds())
