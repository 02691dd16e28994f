"""The door of a deployed site: requests that the approved experiment does not make, or the policy does not
bear."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from perennial.client import door
from perennial.client import time_limit as time_limit_module
from perennial.client.policy import find_withheld
from perennial.client.request_count import RequestCount
from perennial.client.time_limit import time_limit
from perennial.config.site import SitePolicy, load_site_config
from perennial.foundation.errors import ConfigError, PolicyRefusal
from perennial.protocol.measurements import LABEL_COUNTS, TRAIN_ACCURACY
from perennial.protocol.messages import (
    EvaluateReply,
    EvaluateRequest,
    FinishTaskRequest,
    TrainReply,
    TrainRequest,
)
from perennial.protocol.tensors import Tensors
from tests.redteam.attacked_hospital import BASE, POLICIES, RUN, Hospital
from tests.redteam.hostile_server import replace_settings

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.yaml"))


def train(hospital: Hospital, **fields: Any) -> TrainRequest:
    stamp = hospital.stamp() | {key: fields.pop(key) for key in ("run", "round", "task") if key in fields}
    return TrainRequest(**stamp, arrays=Tensors(hospital.arrays()), **fields)


def refused(hospital: Hospital, request: Any) -> str:
    hospital.refusal = ""
    assert hospital.ask(request) is None
    assert hospital.refusal.startswith("policy: ")
    return hospital.refusal.removeprefix("policy: ")


@pytest.mark.parametrize(
    "settings",
    [
        {"turn": {"sweep": 1, "segments": 10}},
        {"correction": {"name": "feddyn", "alpha": 0.1}},
        {"rehearsal": {"weight": 1.0, "temperature": 1.0}},
        {"tell": [LABEL_COUNTS]},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_of_methods_that_were_not_approved(settings: dict[str, Any], tmp_path: Path) -> None:
    hospital = Hospital(tmp_path, POLICIES["open"])
    key = next(iter(settings))
    reason = refused(hospital, train(hospital, settings=json.dumps(settings)))
    assert reason == f"settings.{key}: the approved experiment's strategy (fedavg) does not use it"


def test_a_ring_is_cut_as_approved_and_no_finer(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path, POLICIES["open"], strategy={"name": "serial_ring", "segments": 2})
    finer = train(hospital, settings=json.dumps({"turn": {"sweep": 1, "segments": 40}}))
    assert "settings.turn.segments: found 40, in the approved experiment 2" in refused(hospital, finer)
    approved = train(hospital, settings=json.dumps({"turn": {"sweep": 1, "segments": 2}}))
    assert isinstance(hospital.ask(approved), TrainReply)


def test_other_measurements_layers_and_rounds_than_the_experiments(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path, POLICIES["open"], strategy="feddisco")
    other = train(hospital, settings=json.dumps({"tell": [TRAIN_ACCURACY]}))
    assert "settings.tell: 'train_accuracy'" in refused(hospital, other)
    personal = next(iter(hospital.arrays()))
    kept = train(hospital, settings=json.dumps({"personal": [personal]}))
    assert "settings.personal: the approved" in refused(hospital, kept)
    assert "round: found 5, allowed 1 to 4" in refused(hospital, train(hospital, round=5))
    assert "task: found 1, in round 3 of the approved experiment it is 2" in refused(
        hospital, train(hospital, round=3)
    )
    finish = FinishTaskRequest(**hospital.stamp(2), arrays=Tensors(hospital.arrays()))
    assert "finish_task: the approved experiment does not ask" in refused(hospital, finish)
    evaluate = EvaluateRequest(**hospital.stamp(1), arrays=Tensors(hospital.arrays()))
    assert "evaluate: the approved experiment does not ask for it in round 1" in refused(hospital, evaluate)


def test_requests_are_counted_over_restarts_and_runs(tmp_path: Path) -> None:
    policy = {"answers": ["train", "evaluate"], "max_repeats": 1, "max_runs": 2, "max_evaluations": 3}
    hospital = Hospital(tmp_path, policy)

    def evaluate(value: float, run: str = RUN) -> EvaluateRequest:
        arrays = {name: torch.full_like(tensor, value) for name, tensor in hospital.arrays().items()}
        stamp: Any = hospital.stamp(2) | {"run": run}
        return EvaluateRequest(**stamp, arrays=Tensors(arrays))

    assert hospital.ask(evaluate(0.1)) is not None and hospital.ask(evaluate(0.2)) is not None
    again = hospital.ask(evaluate(0.1))
    assert again == hospital.ask(evaluate(0.1)), "the answer that left before, which is no repeat"
    assert "repeated request: evaluate of round 2 was asked for 2 times" in refused(hospital, evaluate(0.3))
    second = "f" * 16
    assert hospital.ask(evaluate(0.5, second)) is not None
    assert "policy.max_evaluations" in refused(hospital, evaluate(0.6, second))
    assert "policy.max_runs" in refused(hospital, train(hospital, run="e" * 16))
    book = RequestCount(tmp_path / "state")
    assert (book.count_requests("evaluate"), book.count_requests("train")) == (3, 0)
    assert book.path.stat().st_mode & 0o777 == 0o600


def test_temperatures_are_counted_apart_and_as_strictly(tmp_path: Path) -> None:
    hospital = Hospital(
        tmp_path, {"answers": ["evaluate", "measures"], "max_repeats": 1, "max_evaluations": 1}
    )

    def temperature(value: float) -> EvaluateRequest:
        arrays = {name: torch.full_like(tensor, value) for name, tensor in hospital.arrays().items()}
        return EvaluateRequest(**hospital.stamp(2), arrays=Tensors(arrays), tables=True, validation=True)

    told = hospital.ask(temperature(0.1))
    # how likely validation samples are, and how many answers are right of none
    assert isinstance(told, EvaluateReply) and not any(told.correct + told.total)
    assert "policy.max_evaluations" in refused(hospital, temperature(0.2))
    counted = EvaluateRequest(**hospital.stamp(2), arrays=Tensors(hospital.arrays()))
    assert hospital.ask(counted) is not None
    early = EvaluateRequest(
        **hospital.stamp(1), arrays=Tensors(hospital.arrays()), tables=True, validation=True
    )
    assert "temperature: the approved experiment does not ask for it in round 1" in refused(hospital, early)


def test_refusals_and_failures_do_not_shut_the_door_for_a_hospital_that_mends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server asks for a round until it is served; work that took too long stays counted."""
    closed = Hospital(tmp_path, POLICIES["open"] | {"answers": ["evaluate"], "max_repeats": 1})
    for _ in range(5):
        assert "policy.answers" in refused(closed, train(closed))
    assert RequestCount(tmp_path / "state").count_requests("train") == 0
    mended = Hospital(tmp_path, POLICIES["open"] | {"max_repeats": 1})
    assert mended.ask(train(mended)) is not None
    # far longer than the limit, which the counting before it does not reach on a slow machine either
    endless = BASE["learner"] | {"epochs": 10**6}
    slow = Hospital(tmp_path / "slow", POLICIES["open"] | {"max_repeats": 1}, learner=endless)
    monkeypatch.setattr(door, "LONGEST", 0.5)
    assert "longest request" in refused(slow, train(slow))
    assert "longest request" in refused(slow, train(slow))
    assert "repeated request" in refused(slow, train(slow))


def test_large_requests_and_long_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hospital = Hospital(tmp_path, POLICIES["open"])
    monkeypatch.setattr(time_limit_module, "LARGEST", 1000)
    assert "largest request: TrainRequest: found" in refused(hospital, train(hospital))
    monkeypatch.undo()
    monkeypatch.setattr(door, "LONGEST", 0.001)
    slow = Hospital(tmp_path / "slow", POLICIES["open"])
    assert "longest request" in refused(slow, train(slow))
    with (
        pytest.raises(PolicyRefusal, match=r"longest request: the request took longer than 0\.01"),
        time_limit(0.01),
    ):
        while True:
            torch.ones(1).sum()


@pytest.mark.parametrize(
    "fields",
    [
        {"settings": json.dumps({key: value})}
        for key, value in [
            ("epochs", 10**6),
            ("steps", 10**9),
            ("rounds", 10**6),
            ("learner", {"epochs": 10**6}),
            ("noise_multiplier", 1e-12),
            ("privacy", {"mode": "none"}),
            ("privacy", {"clip_norm": 1e6}),
        ]
    ],
    ids=str,
)
def test_no_request_changes_the_work_or_protection_that_was_approved(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    """Epochs, steps, rounds, clip norm and noise are the approved experiment's: no request carries others."""
    private = {"mode": "sample", "clip_norm": 1.0, "noise_multiplier": 1.0, "sample_rate": 0.1}
    hospital = Hospital(tmp_path, POLICIES["open"], privacy=private, evaluation={"federated": False})
    said = refused(hospital, train(hospital, **fields))
    assert "approved experiment" in said
    assert RequestCount(tmp_path / "state").count_requests("train") == 0


@pytest.mark.parametrize(
    "changed",
    [
        "learner={epochs: 1000000}",
        "tasks={count: 2, rounds: 100000}",
        "privacy={mode: sample, clip_norm: 1000000.0, noise_multiplier: 1.0, sample_rate: 0.1}",
        "privacy={mode: sample, clip_norm: 1.0, noise_multiplier: 1.0e-12, sample_rate: 0.1}",
    ],
)
def test_no_run_config_changes_the_work_or_protection_that_was_approved(tmp_path: Path, changed: str) -> None:
    private = {"mode": "sample", "clip_norm": 1.0, "noise_multiplier": 1.0, "sample_rate": 0.1}
    hospital = Hospital(tmp_path, POLICIES["open"], privacy=private, evaluation={"federated": False})
    outcome = replace_settings(hospital, changed)
    assert outcome.recovered == 0 and "run config" in outcome.refusal


@pytest.mark.parametrize(
    ("key", "default", "other"),
    [("max_epochs", 20, 30), ("max_repeats", 3, 10), ("max_clip_norm", 10, 1e9), ("max_bytes", 2**30, 1)],
)
def test_a_limit_that_is_gone_is_taken_at_its_default_alone(
    tmp_path: Path, key: str, default: float, other: float
) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(f"site: graz\nstate_dir: state\npolicy: {{{key}: {default}}}\nother_code: []\n")
    assert load_site_config(path).policy == SitePolicy()
    path.write_text(f"site: graz\nstate_dir: state\npolicy: {{{key}: {other}}}\n")
    with pytest.raises(ConfigError, match=rf"policy\.{key}"):
        load_site_config(path)


@pytest.mark.parametrize(
    ("cells", "stay"),
    [
        ([50, 60, 70], set[int]()),
        # one small cell alone would be the total minus the rest: the next smallest stays too
        ([3, 60, 70], {0, 1}),
        # nobody learns whether a class has none or a few
        ([0, 60, 70], {0, 1}),
        ([3, 4, 30, 70], {0, 1, 2}),
        ([19, 19, 30, 70], {0, 1}),
        ([3, 4], {0, 1}),
    ],
)
def test_cells_that_would_give_another_away_stay_with_it(cells: list[int], stay: set[int]) -> None:
    assert find_withheld(SitePolicy(min_samples=20), "evaluate", cells) == stay
    assert find_withheld(SitePolicy(), "evaluate", cells) == set()
    assert find_withheld(SitePolicy(min_samples=20, below_floor=["evaluate"]), "evaluate", cells) == set()


def test_the_floor_of_one_reply(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path, {"answers": ["train", "evaluate"], "min_samples": 5})
    request = EvaluateRequest(**hospital.stamp(2), arrays=Tensors(hospital.arrays()))
    reply: Any = hospital.ask(request)
    if reply is None:
        assert "policy.min_samples" in hospital.refusal
        return
    for label, samples in enumerate(reply.total):
        assert samples >= 5 or (label in reply.withheld and reply.correct[label] == 0)
