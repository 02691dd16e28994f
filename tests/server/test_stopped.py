"""A run that learns nothing says so: in its notes, in summary.json and at the top of the report."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from perennial.config.experiment import load_experiment
from perennial.config.run import APP_ROOT, RunSettings
from perennial.engine.run import run_in_process
from perennial.server.report.write import write_report
from perennial.server.stopped import LossCourse, signs_of_stopping, what_to_try

QUICKSTART = APP_ROOT / "experiments" / "quickstart.yaml"


def signs(correct: list[int], total: Sequence[int | None], losses: Sequence[float | None]) -> list[str]:
    return signs_of_stopping(correct, total, LossCourse.of(losses))


def test_one_class_alone_is_a_sign() -> None:
    assert "of 3 classes the model recognises one" in signs([50, 0, 0], [50, 30, 20], [])[0]
    assert "recognises none" in signs([0, 0], [50, 30], [])[0]
    assert signs([50], [50], []) == []


def test_guessing_is_a_sign_and_a_little_better_is_none() -> None:
    assert "11.0 %, cannot be told from" in signs([11] * 10, [100] * 10, [])[0]
    assert signs([30] * 10, [100] * 10, []) == []
    # one frequent class: 70 % right is what naming it always would give, but the rare ones are recognised
    assert signs([60, 10, 10], [70, 15, 15], []) == []
    assert signs([65, 3, 2], [70, 15, 15], []) != []


def test_few_samples_are_no_sign() -> None:
    """A model of a small hospital's table is not called one that learnt nothing because nobody can tell."""
    assert signs([0, 4, 0, 3], [1, 4, 2, 4], []) == []
    assert signs([9, 0], [9, 1], []) == []
    assert signs([9, 0], [9, 4], []) != []
    assert signs([2, 2, 2], [5, 5, 5], []) == [], "halfway would be 10 of 15, which is within the noise"
    assert signs([17, 17, 17], [50, 50, 50], []) != []


def test_a_flat_loss_counts_where_nothing_was_measured() -> None:
    flat, falling = [4.6, 4.63, 4.61], [4.6, 3.0, 2.0]
    assert "has not fallen in 3 rounds (4.6 to 4.61)" in signs([0, 0], [None, None], flat)[0]
    assert signs([0, 0], [None, None], falling) == []
    assert signs([48, 49], [50, 50], flat) == []
    assert len(signs([50, 0], [50, 50], flat)) == 2
    assert "no number" in signs([50, 0], [50, 50], [1.0, float("nan")])[0]


def test_what_to_try_names_settings_of_the_experiment() -> None:
    strong = load_experiment(
        QUICKSTART, ["learner.contrastive={weight: 1.0}", "learner.optimizer={lr: 0.05}"]
    )
    tries = " ".join(what_to_try(strong))
    assert "learner.contrastive" in tries and "model.norm: group" in tries and "adam" in tries
    assert "adam" not in " ".join(
        what_to_try(load_experiment(QUICKSTART, ["learner.optimizer={name: adam, lr: 1}"]))
    )


@pytest.mark.parametrize("rate", ["1.0e-9"])
def test_a_run_that_cannot_learn_says_so_everywhere(tmp_path: Path, rate: str) -> None:
    settings = RunSettings(
        experiment=str(QUICKSTART),
        overrides=f"tasks={{count: 2, rounds: 3}};learner.optimizer={{lr: {rate}}};learner.contrastive=null",
        runs=str(tmp_path),
    )
    notes: list[str] = []
    summary = run_in_process(settings, listener=lambda event: notes.append(str(event.get("text", ""))))
    stopped = summary["stopped_learning"]
    assert isinstance(stopped, dict) and [found["task"] for found in stopped["tasks"]][-1] == 2
    assert any("does not tell classes apart" in note for note in notes)
    page = write_report(tmp_path / "quickstart").read_text()
    header = page[: page.index("<nav")]
    assert (
        "The model of run quickstart does not tell classes apart" in header
        and "the training loss has not fallen" in header
    )


def test_the_course_of_a_loss_is_as_long_whatever_the_number_of_rounds() -> None:
    losses = [2.0, None, 1.5, 1.7, float("nan"), 1.9]
    course = LossCourse.of(losses)
    assert (course.rounds, course.first, course.smallest, course.last, course.finite) == (
        5,
        2.0,
        1.5,
        1.9,
        False,
    )
    course = LossCourse()
    for number in range(1000):
        course = LossCourse(**json.loads(json.dumps(vars(course)))).then(2.0 - number * 1e-6)
    assert course == LossCourse(1000, 2.0, 2.0 - 999e-6, 2.0 - 999e-6, True)
    assert course.flat == "the training loss has not fallen in 1000 rounds (2 to 2)"


def test_no_way_out_is_said_to_be_free_of_failure() -> None:
    trained = load_experiment(APP_ROOT / "experiments" / "quickstart.yaml")
    assert not any("cannot fail" in words for words in what_to_try(trained))
