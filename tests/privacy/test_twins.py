"""Two copies of a site that differ in one record: what differs is charged, or listed."""

from dataclasses import replace
from pathlib import Path

import pytest

from perennial.config.experiment import Experiment
from perennial.privacy.statement import UNCOVERED, describe, describe_uncovered
from perennial.protocol import messages, secure_messages
from tests.privacy.twins.cases import CASES, MODES, Case
from tests.privacy.twins.compare import compared, flattened
from tests.privacy.twins.covered import COVERED
from tests.privacy.twins.leaks import LEAKS
from tests.privacy.twins.slices import data_of
from tests.privacy.twins.trial import trials
from tests.privacy.twins.world import Federation, Ran


def test_two_copies_with_the_same_data_say_the_same(tmp_path: Path) -> None:
    settings = MODES["sample"]
    federation = Federation(tmp_path, settings, data_of(settings))
    before = federation.recorded()
    assert before.failed == "" and len(before.answers) > 5
    for after in (
        federation.twin(federation.data["site-0"], before),
        federation.from_saved_state(federation.data["site-0"], before),
    ):
        found = compared(before, after, federation.experiment(), replaced=False)
        assert [one for one in found if not one.path.startswith("operator")] == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_differs_is_charged_or_listed(case: Case) -> None:
    found = [*trials(case)]
    assert found and all(trial.messages for trial in found)
    assert [said for trial in found for said in trial.objections] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAKS)
def test_a_planted_leak_is_found(name: str) -> None:
    leak, case = LEAKS[name]
    assert any(trial.objections for trial in trials(case, leak()))


def test_a_difference_that_nothing_covers_is_an_objection(tmp_path: Path) -> None:
    settings = MODES["none"]
    federation = Federation(tmp_path, settings, data_of(settings))
    before = federation.recorded(copies=False)
    answers = [*before.answers]
    place = next(i for i, answer in enumerate(answers) if answer.kind == "train")
    answers[place] = replace(answers[place], charged=())
    other = answers[place].reply
    assert other is not None and "TrainReply.num_examples" in flattened(other)
    changed = replace(answers[place], reply=other.copy())
    changed.reply["fields"] = type(other["fields"])({**other["fields"], "num_examples": 1})  # pyright: ignore[reportOptionalSubscript, reportCallIssue, reportArgumentType]
    bare, twin = Ran([*answers], {}), Ran([*answers], {})
    twin.answers[place] = changed
    (found,) = compared(bare, twin, federation.experiment(), replaced=False)
    assert found.path == "TrainReply.num_examples" and "no charge covers it" in found.objection


def test_covered_fields_exist_and_the_statement_lists_what_is_not_covered() -> None:
    for fields in COVERED.values():
        for path in fields:
            message, _, field = path.partition(".")
            kind = getattr(messages, message, None) or getattr(secure_messages, message)
            assert field in kind.__dataclass_fields__, path
    experiment = Case("sample", MODES["sample"]).settings
    statement = describe(Experiment.model_validate(experiment).privacy, [])
    assert set(describe_uncovered()) <= set(statement.not_covered)
    assert len(describe_uncovered()) == len(UNCOVERED)
