"""Early stopping by sites' validation: which model is kept, the same bits after a kill, what is refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from perennial.client.plan import Plan
from perennial.config.experiment import Experiment, load_experiment
from perennial.config.rounds import StoppingConfig
from perennial.config.run import APP_ROOT, RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.errors import PolicyRefusal
from perennial.protocol.messages import EvaluateRequest
from perennial.protocol.tensors import Tensors
from perennial.server.continuation import registry_of
from perennial.server.curriculum import Curriculum
from perennial.server.report.write import write_report
from perennial.server.stopped import LossCourse, signs_of_stopping, what_to_try
from perennial.server.stopping import Stopping
from perennial.server.summary import hashes_of
from tests.strategies.test_secure_runs import SMALL, write

RULE = {"patience": 1, "gain": 0.9}
"""No round after the first one is so much better, so that each task ends after its second round."""
TWO_TASKS = {
    "secure": None,
    "tasks": {"count": 2, "rounds": 5},
    "learner": {
        "preset": "none",
        "optimizer": {"lr": 0.05},
        "memory": {"selection": "random", "per_class": 2},
    },
}


def run(folder: Path, resume: str = "", **changes: Any) -> dict[str, Any]:
    return run_in_process(RunSettings(write(folder, **changes), runs=str(folder / "runs"), resume=resume))


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / "secure" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def counts(right: int) -> tuple[list[int], list[int | None]]:
    return [right, right], [10, 10]


def test_the_best_round_is_kept_until_patience_is_over(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    rule = Stopping(StoppingConfig(patience=2, gain=0.1), tmp_path, state)
    for number, right in enumerate([5, 8, 8, 9], start=1):
        assert not rule.over
        rule.judged(number, counts(right), {"w": torch.tensor([float(number)])})
    # 0.9 is no gain of more than 0.1 over 0.8, so rounds 3 and 4 count against the patience of 2
    assert rule.over and (state["round"], state["value"]) == (2, 0.8)
    best = Stopping(rule.config, tmp_path, dict(state)).best()
    assert best is not None and best["w"].item() == 2
    assert "validation was best in round 2 (balanced accuracy 80.0 %), whose model is kept" in rule.in_words(
        1, 4, 9
    )
    assert rule.judged(5, ([1], [None]), {}) is None, "a class whose counts are withheld decides nothing"
    rule.next_task()
    assert not rule.over and rule.best() is None


def test_a_task_ends_early_with_its_best_model_and_the_next_one_keeps_its_rounds(tmp_path: Path) -> None:
    done = run(tmp_path / "stopped", stopping=RULE, **TWO_TASKS)
    assert done["rounds"] == 4
    rounds = [(event["task"], event["round"]) for event in events(tmp_path / "stopped", "round")]
    assert rounds == [(1, 1), (1, 2), (2, 6), (2, 7)]
    notes = [event["text"] for event in events(tmp_path / "stopped", "note")]
    assert any("task 1: stopped after round 2 of 5; validation was best in round 1" in note for note in notes)
    # the model that is kept is that of the first round
    stopped = run(tmp_path / "one", **TWO_TASKS | {"tasks": {"count": 1, "rounds": 5}}, stopping=RULE)
    alone = run(tmp_path / "alone", **TWO_TASKS | {"tasks": {"count": 1, "rounds": 1}})
    assert stopped["rounds"] == 2 and hashes_of(stopped) == hashes_of(alone)
    all_rounds = run(tmp_path / "all", **TWO_TASKS)
    assert all_rounds["rounds"] == 10 and hashes_of(all_rounds) != hashes_of(done)


@pytest.mark.parametrize("moment", ["_choose_model", "_judge_round"])
def test_a_run_that_is_killed_stops_at_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    whole = run(tmp_path / "whole", stopping=RULE, **TWO_TASKS)
    kept = getattr(Curriculum, moment)
    calls = []

    def killed(self: Curriculum, *arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        kept(self, *arguments)

    monkeypatch.setattr(Curriculum, moment, killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", stopping=RULE, **TWO_TASKS)
    monkeypatch.setattr(Curriculum, moment, kept)
    resumed = run(tmp_path / "killed", resume="yes", stopping=RULE, **TWO_TASKS)
    assert hashes_of(resumed) == hashes_of(whole) and resumed["rounds"] == whole["rounds"]


def test_masked_sums_decide_like_counts_in_the_clear(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", secure={"least": 3, "masks": False}, stopping=RULE)
    masked = run(tmp_path / "masked", secure={"least": 3}, stopping=RULE)
    assert hashes_of(plain) == hashes_of(masked)
    values = [
        [event["value"] for event in events(tmp_path / name, "validated")] for name in ("plain", "masked")
    ]
    assert values[0] == values[1] and None not in values[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": SMALL["data"] | {"validation_fraction": 0}}, "data.validation_fraction is 0"),
        ({"evaluation": {"federated": False}}, "evaluation.federated is false"),
        ({"strategy": "fedper"}, "no global model that rounds make better"),
        (
            {
                "privacy": {"mode": "client_local", "clip_norm": 1.0, "noise_multiplier": 100.0},
                "evaluation": {"noise_multiplier": 10.0, "clip_counts": 5.0},
            },
            "no accountant covers",
        ),
    ],
)
def test_what_cannot_stop_early_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Experiment.model_validate(SMALL | {"secure": None, "stopping": RULE} | changes)


def test_a_site_answers_for_validation_only_where_the_experiment_stops() -> None:
    for stopping in (None, RULE):
        experiment = Experiment.model_validate(SMALL | {"secure": None, "stopping": stopping})
        registry = registry_of(experiment)
        request = EvaluateRequest(
            run="0123456789abcdef",
            experiment=experiment.digest,
            class_order=registry.order_hash,
            task=1,
            round=2,
            num_classes=10,
            arrays=Tensors(),
            validation=True,
        )
        plan = Plan(experiment, registry)
        if stopping is None:
            with pytest.raises(PolicyRefusal, match="no stopping rule"):
                plan.check(request)
        else:
            assert plan.check(request) == "evaluate" and plan.most("evaluate", 2) == 2


QUICKSTART = APP_ROOT / "experiments" / "quickstart.yaml"


def signs(correct: list[int], total: Sequence[int | None], losses: Sequence[float | None]) -> list[str]:
    return signs_of_stopping(correct, total, LossCourse.of(losses))


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
