"""Runs the pairs of one case, and says what differed."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perennial.protocol.fields import read_kind
from tests.privacy.twins.cases import Case
from tests.privacy.twins.compare import Difference, compared
from tests.privacy.twins.pairs import HELD_OUT, Pair, Pairs, training_count
from tests.privacy.twins.slices import data_of
from tests.privacy.twins.world import Federation, Ran

TRAINED_ON = ("TrainReply.update", "StatisticsReply.", "DigestReply.", "SparsityReply.", "ClassCountsReply.")
"""Releases that a held-out record has no part in, whoever is charged for them."""

SAVED = ("added", "only of its class", "only of its patient", "unreadable file", "non-finite gradient")
"""Pairs that are also tried from the first copy's saved state; the others tell the same there."""


@dataclass(frozen=True)
class Trial:
    """One pair in one case. way: own, where the twin keeps a state of its own; saved, the first copy's.

    refused: reasons of refusals, in either copy.
    """

    case: str
    mode: str
    pair: str
    way: str
    messages: int
    differences: list[Difference]
    objections: list[str]
    requests: set[str]
    charges: set[str]
    refused: set[str]


def trials(case: Case, planted: AbstractContextManager[Any] | None = None) -> Iterator[Trial]:
    """Every pair of a case. planted: a leak that holds while both copies answer."""
    with tempfile.TemporaryDirectory(prefix="perennial-twins-") as folder:
        yield from _trials(case, Path(folder), planted or nullcontext())


def _trials(case: Case, folder: Path, planted: AbstractContextManager[Any]) -> Iterator[Trial]:
    with planted:
        for number, (federation, chosen) in enumerate(_federations(case, folder)):
            before = federation.recorded()
            for pair in chosen(Pairs(federation, before)):
                after = federation.twin(pair.twin, before)
                yield _judged(case, federation, pair, "own", before, after)
                # what was saved names records, and one that was replaced is gone
                if pair.name in SAVED and case.crash is None and not number:
                    after = federation.from_saved_state(pair.twin, before)
                    bare = [replace(ran, files={}, failed="") for ran in before]
                    yield _judged(case, federation, pair, "saved", bare, after)
            shutil.rmtree(federation.folder, ignore_errors=True)


def _judged(
    case: Case, federation: Federation, pair: Pair, way: str, before: list[Ran], after: list[Ran]
) -> Trial:
    experiment = federation.experiment()
    # a record that is relabelled leaves the first task for the last one
    regrouped = not pair.replaced or pair.name == "relabelled"
    found = compared(before, after, experiment, replaced=pair.replaced, regrouped=regrouped)
    objections = [one.objection for one in found if one.objection]
    if pair.part in HELD_OUT:
        objections += [
            f"{one.path}: depends on a record that is held out"
            for one in found
            if one.path.startswith(TRAINED_ON)
        ]
    if not before[0].answers:
        objections.append(f"nothing was asked: {before[0].failed}")
    answers = [answer for ran in (*before, *after) for answer in ran.answers]
    refused = {
        str(answer.reply["fields"]["reason"])
        for answer in answers
        if answer.reply is not None and read_kind(answer.reply) == "Refusal"
    }
    return Trial(
        case.name,
        experiment.privacy.mode,
        pair.name,
        way,
        len(answers) // 2,
        found,
        sorted(set(objections)),
        {read_kind(answer.request) for answer in answers},
        {entry.kind for answer in answers for entry in answer.charged},
        refused,
    )


def _federations(case: Case, folder: Path) -> Iterator[tuple[Federation, Any]]:
    """The federations of a case, each with what chooses its pairs."""
    data = data_of(case.settings, patients=case.patients, form=case.form)
    first = next(iter(data))
    whole = Federation(folder / "usual", case.settings, data, case.policy, runs=case.runs, crash=case.crash)
    match case.pairs:
        case "few":
            yield whole, lambda pairs: pairs.few()
        case "usual":
            yield whole, lambda pairs: pairs.usual()
        case "patients":
            yield whole, lambda pairs: (*pairs.usual(), pairs.added("only of its patient", "train"))
        case "only of its class":
            lacking = data | {first: data[first].without_class("c0")}
            yield replace(whole, data=lacking), lambda pairs: [pairs.added("only of its class", "train")]
        case "unreadable":
            yield whole, lambda pairs: [pairs.unreadable()]
        case "table":
            yield whole, lambda pairs: (*pairs.usual(), pairs.not_finite())
        case "floor":
            yield from _at_a_bound(case, whole)


def _at_a_bound(case: Case, whole: Federation) -> Iterator[tuple[Federation, Any]]:
    """A floor that the added record reaches, and one that neither copy reaches."""
    before = whole.recorded(copies=False)
    count = training_count(whole, Pairs(whole, before).key)
    bounds = [
        ("exactly at the floor", {"min_samples": count + 1}),
        ("below the floor", {"min_samples": count + 4}),
    ]
    for name, bound in bounds:
        federation = replace(
            whole, folder=whole.folder.parent / name.replace(" ", "-"), policy=dict(case.policy) | bound
        )
        yield federation, lambda pairs, name=name: [pairs.added(name, "train")]
