"""The faults of a federation as all pages and commands name them, with those of answers and of results.

Pages, `perennial deploy status`, `/metrics` and report take their words from here and
`server/fault_kinds.py`; `live/diagnosis.py` finds the faults of what goes on.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from perennial.foundation.errors import ERROR, NO_ANSWER, NOT_APPROVED
from perennial.server.fault_kinds import KINDS, Grade, Owner
from perennial.server.run_record import Summary

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

    def facts(self) -> dict[str, str]:
        """The fault's fields by name, for JSON and the labels of a metric."""
        named = ("grade", "kind", "run", "site", "owner", "cause", "command")
        return {name: getattr(self, name) for name in named}

    def _filled(self, text: str) -> str:
        resume = f"deploy resume {self.run}" if self.deployed else f"run --resume runs/{self.run}"
        return text.format(site=self.site, run=self.run, key=self.key, resume=f"perennial {resume}")


def ranked(faults: Iterable[Fault]) -> list[Fault]:
    """The faults without duplicates, the gravest first, and otherwise in the order of KINDS."""
    order = {kind: place for place, kind in enumerate(KINDS)}
    return sorted(
        dict.fromkeys(faults), key=lambda one: (one.grade != "critical", order[one.kind], one.run, one.site)
    )


def grouped(faults: Iterable[Fault]) -> list[Fault]:
    """The faults as ranked() gives them, with one sentence for sites that differ in their names alone."""
    together: dict[Fault, list[Fault]] = {}
    for fault in ranked(faults):
        alone = "{site}" in KINDS[fault.kind].command
        together.setdefault(fault if alone else replace(fault, site="*"), []).append(fault)
    return [replace(ones[0], site=_named([one.site for one in ones])) for ones in together.values()]


def _named(sites: list[str]) -> str:
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
        return Fault("wrong_name", site, run, shown_sentence(reason))
    if "speaks protocol version" in reason:
        return Fault("version", site, run, shown_sentence(reason))
    if "has experiment" in reason:
        return Fault("other_code", site, run)
    return Fault("failed" if reason.startswith(ERROR) else "invalid", site, run, shown_sentence(reason))


def shown_sentence(words: str) -> str:
    """The words with a capital at the beginning and one full stop at the end."""
    return f"{words[:1].upper()}{words[1:].rstrip('.')}."


def _of_own_state(site: str, words: str) -> Fault:
    if "No space left" in words:
        return Fault("site_disk_full", site)
    return of_ledger(site, words) or Fault("site_error", site, detail=shown_sentence(words))


def of_ledger(site: str, words: str) -> Fault | None:
    """The fault of a ledger that an error's words are about; None if they are about something else."""
    if "lacks line" in words or words.startswith("ledger_tip: no file"):
        return Fault("ledger_behind", site)
    return Fault("ledger_unreadable", site, detail=shown_sentence(words)) if "ledger" in words else None


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
    after each round of one task. classes: accuracy of each class so far. forgotten: of the worst task.
    """
    measured = [value for value in by_round if value is not None]
    newest = measured[-ROUNDS:]
    if not signs and len(measured) > ROUNDS and max(newest) < FALLEN * max(measured):
        signs = ["its accuracy has fallen to under half of what this task had reached"]
    if signs:
        yield Fault("collapsed", run=run, detail=shown_sentence("; ".join(signs)), key="; or ".join(tries()))
    never = [name for name, share in classes.items() if share == 0.0]
    if never:
        yield Fault("unrecognised", run=run, detail=f"{len(never)} of {len(classes)}: {_named(never)}.")
    if forgotten is not None and forgotten > FORGETTING:
        yield Fault("forgetting", run=run)


def of_summary(run: str, summary: Summary, by_round: Sequence[float | None] = ()) -> Iterator[Fault]:
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
    yield from of_learning(run, signs, lambda: tries, by_round, classes, max(lost, default=None))
    table = extra.get("cross_site")
    rows = table.get("sites") if isinstance(table, dict) else None
    found = rows.items() if isinstance(rows, dict) else ()
    marks = {site: str(row.get("marked") or "") for site, row in found if isinstance(row, dict)}
    yield from of_marks(run, marks)


def of_marks(run: str, marks: Mapping[str, str]) -> Iterator[Fault]:
    """Yield a fault for each site whose sums differ from others'. marks: site -> how, '' if they do not."""
    for site, mark in marks.items():
        if mark:
            yield Fault("contradicting", site, run, shown_sentence(mark))
