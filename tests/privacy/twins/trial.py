"""Runs the pairs of one case, and says what differed."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.privacy.twins.cases import Case
from tests.privacy.twins.compare import compared
from tests.privacy.twins.pairs import HELD_OUT, Pair, Pairs, training_count
from tests.privacy.twins.slices import data_of
from tests.privacy.twins.world import Federation, Ran

TRAINED_ON = ("TrainReply.update", "StatisticsReply.", "DigestReply.", "SparsityReply.", "ClassCountsReply.")
"""Releases that a held-out record has no part in, whoever is charged for them."""

SAVED = ("added", "only of its patient")
"""Pairs that are also tried from the first copy's saved state; the others tell the same there."""


@dataclass(frozen=True)
class Trial:
    """One pair in one case, from the twin's own state or the first copy's."""

    messages: int
    objections: list[str]


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
                yield _judged(federation, pair, before, after)
                # what was saved names records, and one that was replaced is gone
                if pair.name in SAVED and not number:
                    after = federation.from_saved_state(pair.twin, before)
                    yield _judged(federation, pair, replace(before, files={}, failed=""), after)
            shutil.rmtree(federation.folder, ignore_errors=True)


def _judged(federation: Federation, pair: Pair, before: Ran, after: Ran) -> Trial:
    found = compared(before, after, federation.experiment(), replaced=pair.replaced)
    objections = [one.objection for one in found if one.objection]
    if pair.part in HELD_OUT:
        objections += [
            f"{one.path}: depends on a record that is held out"
            for one in found
            if one.path.startswith(TRAINED_ON)
        ]
    if not before.answers:
        objections.append(f"nothing was asked: {before.failed}")
    return Trial(len(before.answers), sorted(set(objections)))


def _federations(case: Case, folder: Path) -> Iterator[tuple[Federation, Any]]:
    """The federations of a case, each with what chooses its pairs."""
    whole = Federation(folder / "usual", case.settings, data_of(case.settings, patients=case.patients))
    match case.pairs:
        case "few":
            yield whole, lambda pairs: pairs.few()
        case "usual":
            yield whole, lambda pairs: pairs.usual()
        case "patients":
            yield whole, lambda pairs: (*pairs.usual(), pairs.added("only of its patient", "train"))
        case "floor":
            yield from _at_a_bound(whole)


def _at_a_bound(whole: Federation) -> Iterator[tuple[Federation, Any]]:
    """A floor that the added record reaches, and one that neither copy reaches."""
    before = whole.recorded(copies=False)
    count = training_count(whole, Pairs(whole, before).key)
    bounds = [
        ("exactly at the floor", {"min_samples": count + 1}),
        ("below the floor", {"min_samples": count + 4}),
    ]
    for name, bound in bounds:
        federation = replace(whole, folder=whole.folder.parent / name.replace(" ", "-"), policy=bound)
        yield federation, lambda pairs, name=name: [pairs.added(name, "train")]
