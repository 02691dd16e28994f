"""A server that asks for right answers to single a held-out patient out: what counts tell, and how often."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from perennial.client.plan import Plan
from perennial.client.policy import find_withheld
from perennial.client.request_count import REPEATS, RequestCount
from perennial.config.site import SitePolicy
from perennial.foundation.errors import PolicyRefusal
from perennial.protocol.measurements import HELD_OUT_ACCURACY
from perennial.protocol.messages import (
    CompareHeadsRequest,
    EvaluateReply,
    EvaluateRequest,
    FinishTaskRequest,
    PersonalModelReply,
    PersonalModelRequest,
    TrainReply,
    TrainRequest,
)
from perennial.protocol.tensors import Tensors
from tests.redteam.attacked_hospital import BASE, Hospital
from tests.redteam.hostile_server import threshold

ONE_CLASS_TASKS = {"tasks": {"count": 10, "rounds": 1}}
WIDE = {
    "data": {"source": "digits", "sites": 2, "partition": {"kind": "iid"}, "test_fraction": 0.5},
    "tasks": {"count": 1, "rounds": 1},
}


def halving(hospital: Hospital, label: int) -> tuple[int, list[tuple[int, int]]]:
    """Bisects the level of each pixel until one patient is right: (patients singled out, counts told)."""
    told, alone = [], 0
    for pixel in range(18, 30):
        low, high = -4.0, 4.0
        for _ in range(9):
            middle = (low + high) / 2
            model = threshold(hospital.arrays(), pixel, middle, label)
            reply = hospital.ask(EvaluateRequest(**hospital.stamp(), arrays=Tensors(model)))
            if not isinstance(reply, EvaluateReply):
                high = middle
                continue
            right, total = reply.correct[label], reply.total[label]
            told.append((right, total))
            if right == 1:
                alone += 1
                break
            low, high = (middle, high) if right > 1 else (low, middle)
    return alone, told


def test_no_count_of_few_right_or_few_wrong_answers_leaves(tmp_path: Path) -> None:
    many = {"answers": ["evaluate"], "max_repeats": 10**6, "max_evaluations": 10**6}
    alone, _ = halving(Hospital(tmp_path / "open", many, **WIDE), label=3)
    assert alone > 0, "the attack itself works where there is no floor"
    alone, told = halving(Hospital(tmp_path / "floor", many | {"min_samples": 10}, **WIDE), label=3)
    assert alone == 0 and told
    assert all((right, total) == (0, 0) or 10 <= right <= total - 10 for right, total in told)


@pytest.mark.parametrize(
    ("right", "total", "stay"),
    [
        ([30, 30, 30], [60, 60, 60], set[int]()),
        ([1, 30, 30], [41, 60, 60], {0, 1}),
        ([40, 30, 30], [41, 60, 60], {0, 1}),
        # whether all are right or all but one must not show either
        ([41, 30, 30], [41, 60, 60], {0, 1}),
        ([0, 30, 30], [41, 60, 60], {0, 1}),
    ],
)
def test_right_and_wrong_answers_both_have_the_floor(
    right: list[int], total: list[int], stay: set[int]
) -> None:
    policy = SitePolicy(min_samples=10)
    found = find_withheld(policy, "evaluate", total, right)
    assert found == stay if stay == set() else 0 in found
    assert find_withheld(SitePolicy(), "evaluate", total, right) == set()


def questions_answered(hospital: Hospital, policy: SitePolicy) -> int:
    """How many different models a server gets counts of, by every run, round and repeat that there is."""
    plan = Plan(hospital.experiment, hospital.site.process.registry)
    book, answered = RequestCount(hospital.config.state_dir), 0
    for run in range(policy.max_runs):
        for number in range(1, plan.rounds + 1):
            stamp = hospital.stamp(number) | {"run": f"{run:016x}", "task": number, "num_classes": number}
            for _ in range(1 + REPEATS):
                model = Tensors(head=torch.full((1,), float(answered)))
                try:
                    book.take(policy, plan, "evaluate", EvaluateRequest(**stamp, arrays=model))
                    answered += 1
                except PolicyRefusal as refusal:
                    assert "policy.max_" in str(refusal) or "repeated request" in str(refusal)
    return answered


def test_an_experiment_learns_what_it_needs_and_not_the_bits_of_an_image(tmp_path: Path) -> None:
    """73 of 100 questions gave all 64 bits of an image."""
    hospital = Hospital(tmp_path, {"answers": ["evaluate"]}, **ONE_CLASS_TASKS)
    policy = hospital.config.policy
    needed = 10
    answered = questions_answered(hospital, policy)
    assert answered == needed * policy.max_runs + REPEATS < 64
    strict = policy.model_copy(update={"max_evaluations": 12})
    assert questions_answered(Hospital(tmp_path / "b", {}, **ONE_CLASS_TASKS), strict) == 12


def test_the_same_question_asked_again_tells_nothing_and_costs_nothing(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path, {"answers": ["evaluate"], "max_evaluations": 1}, **WIDE)

    def ask(value: float) -> Any:
        arrays = {name: torch.full_like(tensor, value) for name, tensor in hospital.arrays().items()}
        return hospital.ask(EvaluateRequest(**hospital.stamp(), arrays=Tensors(arrays)))

    first, again = ask(0.5), ask(0.5)
    assert isinstance(first, EvaluateReply) and again.correct == first.correct
    assert ask(0.25) is None and "policy.max_evaluations" in hospital.refusal


def test_each_head_of_a_comparison_is_a_question(tmp_path: Path) -> None:
    closed = {
        "model": {"name": "features", "features": [{"name": "random", "width": 12}]},
        "learner": None,
        "data": BASE["data"] | {"validation_fraction": 0.2},
        "strategy": {
            "name": "analytic",
            "head": "ridge",
            "shrinkage": "validation",
            "shrinkages": [0.1, 1.0],
        },
        "tasks": {"count": 1, "rounds": 1},
        "evaluation": {"federated": False},
    }
    policy = {"answers": ["evaluate", "statistics"], "max_evaluations": 3}
    hospital = Hospital(tmp_path, policy, **closed)
    features = hospital.site.models.load_fixed_features()

    def compare(heads: int, value: float = 0.0) -> Any:
        classes = hospital.stamp()["num_classes"]
        tensors = Tensors(
            weight=torch.full((heads, classes, features.width), value), bias=torch.zeros(heads, classes)
        )
        request = CompareHeadsRequest(**hospital.stamp(), features=features.content, heads=tensors)
        hospital.refusal = ""
        return hospital.ask(request)

    assert compare(64) is None
    assert "heads: found 64, the approved experiment compares 2 at most" in hospital.refusal
    assert compare(2) is not None, hospital.refusal
    assert compare(2, 1.0) is None and "policy.max_evaluations" in hospital.refusal
    assert compare(1, 1.0) is not None, hospital.refusal


def trained(hospital: Hospital, value: int, **order: Any) -> Any:
    """The site's answer to a model that the server chose by `value`, with an order in its settings."""
    draw = torch.Generator().manual_seed(value)
    arrays = {name: torch.randn(x.shape, generator=draw) for name, x in hospital.arrays().items()}
    hospital.refusal = ""
    return hospital.ask(TrainRequest(**hospital.stamp(), arrays=Tensors(arrays), settings=json.dumps(order)))


STILL: dict[str, Any] = {
    "data": BASE["data"] | {"validation_fraction": 0.2},
    "learner": {"preset": "none", "optimizer": {"lr": 1e-9}, "batch_size": 512},
}
"""Blocks of an experiment whose training leaves a model as the server made it."""
BY_QUALITY: dict[str, Any] = STILL | {"strategy": {"name": "multi_factor", "gamma": 0.1}}
TELL = {"tell": [HELD_OUT_ACCURACY]}


def test_weights_by_size_alone_ask_for_no_right_answers(tmp_path: Path) -> None:
    policy = {"answers": ["train", "evaluate"]}
    hospital = Hospital(tmp_path, policy, **STILL, strategy="multi_factor")
    assert trained(hospital, 1, **TELL) is None and "settings.tell" in hospital.refusal
    assert isinstance(trained(hospital, 1), TrainReply)


def test_right_answers_beside_an_update_are_questions_like_others(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path, {"answers": ["train", "evaluate"], "max_evaluations": 1}, **BY_QUALITY)
    plan = Plan(hospital.experiment, hospital.site.process.registry)
    assert plan.count_questions() == plan.rounds + 2, "each round's, and each task's evaluation"
    first = trained(hospital, 1, **TELL)
    assert HELD_OUT_ACCURACY in json.loads(first.metrics)
    assert trained(hospital, 1, **TELL).metrics == first.metrics, "as after a crash of the server"
    assert trained(hospital, 2, **TELL) is None and "policy.max_evaluations" in hospital.refusal
    assert trained(hospital, 2) is not None, "training itself goes on"


@pytest.mark.parametrize(
    "policy",
    [
        {"answers": ["train"], "max_evaluations": 0},
        # of 13 samples fewer than 5 are right, whatever such a model says
        {"answers": ["train", "evaluate"], "min_samples": 5},
    ],
)
def test_right_answers_stay_where_evaluation_does_or_they_are_few(
    tmp_path: Path, policy: dict[str, Any]
) -> None:
    hospital = Hospital(tmp_path, policy, **BY_QUALITY)
    for value in (2, 3, 4):
        assert json.loads(trained(hospital, value, **TELL).metrics) == {}


FEDPER: dict[str, Any] = STILL | {
    "strategy": {"name": "fedper", "personal": ["backbone", "head"]},
    "evaluation": {"federated": True, "every": "round"},
}


def join(hospital: Hospital) -> Any:
    """The answer to one and the same question about the site's own model."""
    zeros = Tensors({name: torch.zeros_like(x) for name, x in hospital.arrays().items()})
    hospital.refusal = ""
    return hospital.ask(PersonalModelRequest(**hospital.stamp(), arrays=zeros, personal=sorted(zeros)))


def forget_replies(hospital: Hospital) -> None:
    for file in (hospital.config.state_dir / "runs").rglob("released/*"):
        file.unlink()


def test_one_question_of_other_own_layers_is_another_question(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path, {"answers": ["train", "evaluate"], "max_evaluations": 1}, **FEDPER)
    own = {"personal": sorted(hospital.arrays())}
    assert trained(hospital, 1, **own) is not None
    first = join(hospital)
    assert isinstance(first, PersonalModelReply) and first.correct is not None
    # a site that was killed before it kept its reply, or whose server took up an older checkpoint
    forget_replies(hospital)
    assert trained(hospital, 1, **own) is not None
    assert join(hospital).correct == first.correct
    assert trained(hospital, 2, **own) is not None
    forget_replies(hospital)
    assert join(hospital) is None and "policy.max_evaluations" in hospital.refusal


def test_a_personal_model_of_which_nothing_is_told_is_no_question(tmp_path: Path) -> None:
    silent = FEDPER | {"evaluation": {"federated": False, "every": "round"}}
    hospital = Hospital(tmp_path, {"answers": ["train"], "max_evaluations": 0}, **silent)
    reply = join(hospital)
    assert isinstance(reply, PersonalModelReply) and reply.correct is None


def test_class_means_of_other_exemplars_are_another_question(tmp_path: Path) -> None:
    learner = STILL["learner"] | {
        "classifier": "nearest_mean",
        "memory": {"selection": "herding", "per_class": 4},
    }
    changes: dict[str, Any] = {"learner": learner, "tasks": {"count": 1, "rounds": 1}}
    hospital = Hospital(tmp_path, {"answers": ["train", "evaluate"], "max_evaluations": 1}, **changes)

    def ask(value: int) -> Any:
        draw = torch.Generator().manual_seed(value)
        arrays = {name: torch.randn(x.shape, generator=draw) for name, x in hospital.arrays().items()}
        assert hospital.ask(FinishTaskRequest(**hospital.stamp(), arrays=Tensors(arrays))), hospital.refusal
        forget_replies(hospital)
        return hospital.ask(EvaluateRequest(**hospital.stamp(), arrays=Tensors(hospital.arrays())))

    assert isinstance(ask(1), EvaluateReply) and isinstance(ask(1), EvaluateReply)
    assert ask(2) is None and "policy.max_evaluations" in hospital.refusal
