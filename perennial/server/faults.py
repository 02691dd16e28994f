"""The faults of a federation as all pages and commands name them, with those of answers and of results.

Pages, `perennial deploy status`, `/metrics` and report take their words from here and
`server/faults.py`; `live/diagnosis.py` finds the faults of what goes on.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from perennial.foundation.errors import ERROR, NO_ANSWER, NOT_APPROVED
from perennial.server.measures.record import Measures, drop_classes_of_few
from perennial.server.run_record import Summary

Grade = Literal["critical", "warning"]
Owner = Literal["operator", "hospital", "network", "nobody"]


@dataclass(frozen=True)
class Kind:
    """A kind of fault. cause, command: texts with {site}, {run} and others.

    seen: where it is named. p: the operator's pages, s: `perennial deploy status`, r: the report, h: the
    hospital's page.
    """

    cause: str
    owner: Owner
    command: str
    seen: str
    grade: Grade


_KINDS = """
superlink: critical, operator, ps
    The SuperLink gives no sign of life: no site is served.
    perennial deploy start (containers: docker compose up -d)
unknown_run: critical, operator, ps
    Flower's run {key} goes on, and no folder here names it.
    perennial deploy stop {key}
superexec: critical, operator, s
    Run {run} is submitted, and no process begins it.
    restart the SuperLink: perennial deploy start (containers: docker compose up -d superexec-serverapp)
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
certificate_waits: warning, operator, ps
    The SuperLink still serves its former certificate.
    restart the SuperLink
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
    perennial deploy logs {run}; stop it, mend what the sites' reasons name, submit it under another --name
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
    perennial site review FAB, then perennial site approve FAB SHA-256
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


def _parse_kinds() -> Iterator[tuple[str, Kind]]:
    lines = _KINDS.strip().splitlines()
    for head, cause, command in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        name, _, facts = head.partition(": ")
        grade, owner, seen = facts.split(", ")
        yield name, Kind(cause.strip(), cast(Owner, owner), command.strip(), seen, cast(Grade, grade))


KINDS = dict(_parse_kinds())


WRONG_NAME = "it says it is site"
"""Of the reason why a node that says another site's name takes no part."""
FORGETTING = 0.3
"""Share of a task's best accuracy, in points over 100, from whose loss on forgetting is named."""
FALLEN, ROUNDS = 0.5, 3
"""Accuracy under this share of the task's best, in so many rounds in a row, has collapsed."""
SHOWN = 6
"""Sites that one sentence names."""


@dataclass(frozen=True)
class Fault:
    """One present fault. Two are the same fault if kind, site, run and key are equal.

    key: what it is about, if there can be several: a rule, a file, a setting. detail: what is known beyond
    the sentence, which may change. since: in seconds since 1970. deployed: whether
    `perennial deploy` started the run.
    """

    kind: str
    site: str = ""
    run: str = ""
    detail: str = field(default="", compare=False)
    since: float | None = field(default=None, compare=False)
    deployed: bool = field(default=True, compare=False)
    key: str = ""

    @property
    def cause(self) -> str:
        """What is wrong, in one sentence."""
        return self._filled(KINDS[self.kind].cause)

    @property
    def owner(self) -> Owner:
        """Who has to act."""
        return KINDS[self.kind].owner

    @property
    def command(self) -> str:
        """What to do, or the command that ends the fault."""
        return self._filled(KINDS[self.kind].command)

    @property
    def grade(self) -> Grade:
        return KINDS[self.kind].grade

    @property
    def said(self) -> str:
        """The sentence on the cause, followed by the detail."""
        return f"{self.cause} {self.detail}".rstrip()

    @property
    def turn(self) -> str:
        """Who has to act and what to do, in one sentence."""
        return f"{self.owner.capitalize()}: {self.command}."

    def collect_facts(self) -> dict[str, str]:
        """The fault's fields by name, for JSON and the labels of a metric."""
        named = ("grade", "kind", "run", "site", "owner", "cause", "command")
        return {name: getattr(self, name) for name in named}

    def _filled(self, text: str) -> str:
        resume = f"deploy resume {self.run}" if self.deployed else f"run --resume runs/{self.run}"
        return text.format(site=self.site, run=self.run, key=self.key, resume=f"perennial {resume}")


def rank_faults(faults: Iterable[Fault]) -> list[Fault]:
    """The faults without duplicates, the gravest first, and otherwise in the order of KINDS."""
    order = {kind: place for place, kind in enumerate(KINDS)}
    return sorted(
        dict.fromkeys(faults), key=lambda one: (one.grade != "critical", order[one.kind], one.run, one.site)
    )


def group_faults(faults: Iterable[Fault]) -> list[Fault]:
    """The faults as ranked() gives them, with one sentence for sites that differ in their names alone."""
    together: dict[Fault, list[Fault]] = {}
    for fault in rank_faults(faults):
        alone = "{site}" in KINDS[fault.kind].command
        together.setdefault(fault if alone else replace(fault, site="*"), []).append(fault)
    return [replace(ones[0], site=_join_sites([one.site for one in ones])) for ones in together.values()]


def _join_sites(sites: list[str]) -> str:
    shown = ", ".join(sites[:SHOWN])
    return f"{shown} and {len(sites) - SHOWN} more" if len(sites) > SHOWN else shown


def of_answer(site: str, run: str, reason: str, *, here: bool = False) -> Fault:
    """The fault behind an error or a refusal that came in place of an answer.

    reason: for a refusal, it begins with what refused (policy, privacy, state, ...). here: at the site
    itself, which may know of its disk and ledger.
    """
    kind, _, words = reason.partition(": ")
    match kind:
        case "policy" | "privacy" if "would bring this site's lifetime" in words:
            return Fault("budget", site, run)
        case "policy" if words.startswith("this site pauses"):
            return Fault("site_paused", site, run)
        case "policy" if words.startswith("this site has withdrawn"):
            return Fault("withdrawn", site, run)
        case "policy" | "privacy":
            found = re.match(r"(?:policy|state|privacy)\.\w+", words)
            return Fault("policy", site, run, words, key=found.group() if found else "what it names")
        case "protocol" | "config" if "version" in words:
            return Fault("version", site, run, words)
        case "protocol" | "config":
            return Fault("other_code", site, run, words)
        case "state" | "data" | "error":
            return _of_own_state(site, words) if here else Fault("own_reason", site, run)
    if reason == NOT_APPROVED:
        return Fault("not_approved", site, run)
    if reason.startswith(NO_ANSWER):
        return Fault("deadline", site, run)
    if WRONG_NAME in reason:
        return Fault("wrong_name", site, run, format_sentence(reason))
    if "speaks protocol version" in reason:
        return Fault("version", site, run, format_sentence(reason))
    if "has experiment" in reason:
        return Fault("other_code", site, run)
    return Fault("failed" if reason.startswith(ERROR) else "invalid", site, run, format_sentence(reason))


def format_sentence(words: str) -> str:
    """The words with a capital at the beginning and one full stop at the end."""
    return f"{words[:1].upper()}{words[1:].rstrip('.')}."


def _of_own_state(site: str, words: str) -> Fault:
    if "No space left" in words:
        return Fault("site_disk_full", site)
    return of_ledger(site, words) or Fault("site_error", site, detail=format_sentence(words))


def of_ledger(site: str, words: str) -> Fault | None:
    """The fault of a ledger that an error's words are about; None if they are about something else."""
    if "lacks line" in words or words.startswith("ledger_tip: no file"):
        return Fault("ledger_behind", site)
    return Fault("ledger_unreadable", site, detail=format_sentence(words)) if "ledger" in words else None


def of_learning(
    run: str,
    signs: Sequence[str],
    tries: Callable[[], Sequence[str]],
    by_round: Sequence[float | None],
    classes: Mapping[str, float | None],
    forgotten: float | None,
) -> Iterator[Fault]:
    """Yield the faults of a run's model: collapsed, classes never recognised, too much forgotten.

    signs: of server/stopped.py, after the newest task. tries: settings that may help. by_round: accuracy
    after each round of one task. classes: accuracy of each with enough samples. forgotten: of the worst task.
    """
    measured = [value for value in by_round if value is not None]
    newest = measured[-ROUNDS:]
    if not signs and len(measured) > ROUNDS and max(newest) < FALLEN * max(measured):
        signs = ["its accuracy has fallen to under half of what this task had reached"]
    if signs:
        yield Fault("collapsed", run=run, detail=format_sentence("; ".join(signs)), key="; or ".join(tries()))
    never = [name for name, share in classes.items() if share == 0.0]
    if never:
        yield Fault("unrecognised", run=run, detail=f"{len(never)} of {len(classes)}: {_join_sites(never)}.")
    if forgotten is not None and forgotten > FORGETTING:
        yield Fault("forgetting", run=run)


def of_summary(
    run: str, summary: Summary, by_round: Sequence[float | None] = (), measures: Measures | None = None
) -> Iterator[Fault]:
    """Yield the faults of a finished run's model and of its sites' sums. by_round: as in of_learning()."""
    extra = summary.model_extra or {}
    stopped, matrix = summary.stopped_learning, summary.accuracy_matrix
    last = stopped.tasks[-1] if stopped is not None and stopped.tasks else None
    signs = last.signs if last is not None and last.task == len(matrix) else []
    shares = (extra.get("class_accuracy") or [()])[-1]
    lost = []
    for task, now in enumerate(matrix[-1][:-1]):
        best = max((row[task] or 0.0 for row in matrix[task:-1]), default=0.0)
        lost += [] if now is None else [best - now]
    classes = dict(zip(summary.classes, shares, strict=False))
    tries = stopped.to_try if stopped is not None else ["see docs/which_method.md"]
    judged = drop_classes_of_few(classes, measures)
    yield from of_learning(run, signs, lambda: tries, by_round, judged, max(lost, default=None))
    table = extra.get("cross_site")
    rows = table.get("sites") if isinstance(table, dict) else None
    found = rows.items() if isinstance(rows, dict) else ()
    marks = {site: str(row.get("marked") or "") for site, row in found if isinstance(row, dict)}
    yield from of_marks(run, marks)


def of_marks(run: str, marks: Mapping[str, str]) -> Iterator[Fault]:
    """Yield a fault for each site whose sums differ from others'. marks: site -> how, '' if they do not."""
    for site, mark in marks.items():
        if mark:
            yield Fault("contradicting", site, run, format_sentence(mark))
