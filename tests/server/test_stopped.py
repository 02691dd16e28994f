"""A run that learns nothing says so: in its notes, in summary.json and at the top of the report."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from perennial.config.experiment import load_experiment
from perennial.config.run import APP_ROOT, RunSettings
from perennial.engine.run import run_in_process
from perennial.server.report.write import write_report
from perennial.server.stopped import LossCourse, find_signs_of_stopping, suggest_settings

QUICKSTART = APP_ROOT / "experiments" / "quickstart.yaml"


def signs(correct: list[int], total: Sequence[int | None], losses: Sequence[float | None]) -> list[str]:
    return find_signs_of_stopping(correct, total, LossCourse.of(losses))


def test_one_class_alone_is_a_sign() -> None:
    assert "of 3 classes the model recognises one" in signs([50, 0, 0], [50, 30, 20], [])[0]
    assert "recognises none" in signs([0, 0], [50, 30], [])[0]
    assert signs([50], [50], []) == []


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
    tries = " ".join(suggest_settings(strong))
    assert "learner.contrastive" in tries and "model.norm: group" in tries and "adam" in tries
    assert "adam" not in " ".join(
        suggest_settings(load_experiment(QUICKSTART, ["learner.optimizer={name: adam, lr: 1}"]))
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
