"""Whole runs in cohorts: beside sequential ones, over workers, resumed, refused and fallen back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from flwr.app import Context, Message, RecordDict
from safetensors.torch import load_file

from perennial.config.experiment import Experiment
from perennial.config.run import RunSettings
from perennial.engine.cohorts import LARGEST, plan_cohorts
from perennial.engine.frames import decode_frames, encode_frames
from perennial.engine.grid import set_task_identity
from perennial.engine.run import run_in_process
from perennial.foundation.errors import StateError
from perennial.models.saved import PERSONAL_MODEL
from perennial.protocol.messages import EvaluateRequest, TrainReply, TrainRequest
from perennial.protocol.stack import Stack
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import Tensors
from perennial.server.checkpoint import load_checkpoint
from perennial.strategies.round.exchange import Exchange, Owed
from perennial.strategies.round.gate import Gate, Rejected

SMALL: dict[str, Any] = {
    "name": "small",
    "seed": 3,
    "data": {
        "source": "digits",
        "sites": 5,
        "samples_limit": 400,
        "partition": {"kind": "dirichlet", "alpha": 1.0},
    },
    "tasks": {"count": 1, "rounds": 1},
    "model": {"name": "small_cnn"},
    "learner": {"preset": "none", "epochs": 1, "batch_size": 16, "optimizer": {"lr": 0.05, "momentum": 0.9}},
    "evaluation": {"federated": False},
}
TWO_TASKS = {"tasks": {"count": 2, "rounds": 1}}
REMEMBERING = {"distillation": {"weight": 1.0}, "memory": {"per_class": 3}}
SECURE_NOISE = {"mode": "client_local", "clip_norm": 1.0, "noise_multiplier": 0.5}


def merged(*changes: dict[str, Any]) -> dict[str, Any]:
    settings = json.loads(json.dumps(SMALL))
    for change in changes:
        for key, value in change.items():
            old = settings.get(key)
            settings[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return settings


def run(
    folder: Path, name: str, settings: dict[str, Any], cohort: Any = None, workers: int = 1, **more: Any
) -> dict[str, Any]:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings))
    chosen = RunSettings(str(path), name=name, runs=str(folder / "runs"), device="cpu", **more)
    return run_in_process(chosen, workers, cohort=cohort)


def models(folder: Path, name: str) -> torch.Tensor:
    """The global model, and the sites' own where they have any."""
    run = folder / "runs" / name
    files = [run / "model.safetensors", *sorted(run.glob(f"sites/*/{PERSONAL_MODEL}"))]
    named = [tensors for tensors in map(load_file, files)]
    return torch.cat([tensors[key].reshape(-1).float() for tensors in named for key in sorted(tensors)])


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": "fedavg"},
        {"strategy": {"name": "multi_factor", "alpha": 0.7, "beta": 0.1, "gamma": 0.1, "delta": 0.1}},
        {"strategy": {"name": "scaffold"}, "learner": {"preset": "none", "optimizer": {"lr": 0.05}}},
        {"strategy": {"name": "feddyn", "alpha": 0.1}},
        {"strategy": {"name": "fedper", "personal": ["head"]}},
        {"strategy": {"name": "layer_attention"}},
        {"privacy": SECURE_NOISE},
        {"privacy": {**SECURE_NOISE, "mode": "client_central", "noise_multiplier": 0.01}},
        {"adversaries": [{"site": "site-1", "kind": "label_flip"}, {"site": "site-2", "kind": "free_rider"}]},
    ],
    ids=str,
)
def test_a_round_in_cohorts_agrees_with_one_site_after_the_other(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    settings = merged(changes)
    alone, together = run(tmp_path, "alone", settings), run(tmp_path, "together", settings, cohort=3)
    assert alone["cohort"] == 1 and together["cohort"] == 3
    assert alone["sites"] == together["sites"] and alone["bytes_up"] == together["bytes_up"]
    one, other = models(tmp_path, "alone"), models(tmp_path, "together")
    assert 0 < float((one - other).norm()) <= 1e-4 * float(one.norm())


def test_the_size_stands_in_the_checkpoint_and_no_other_resumes(tmp_path: Path) -> None:
    settings = merged({"tasks": {"count": 1, "rounds": 2}})
    whole = run(tmp_path, "whole", settings, cohort=4)
    run(tmp_path, "part", merged(), cohort=4)
    folder = tmp_path / "runs" / "part"
    assert load_checkpoint(folder / "checkpoint")[0].progress.cohort == 4
    (folder / "checkpoint" / "before.safetensors").unlink(missing_ok=True)
    with pytest.raises(StateError, match=r"began with 4 sites in one pass, found 2.*--cohort 4"):
        run(tmp_path, "part", merged(), cohort=2, resume="yes")
    assert whole["cohort"] == 4
    resumed = run(tmp_path, "part", merged(), resume="yes")
    assert resumed["cohort"] == 4


def test_a_stopped_run_goes_on_in_its_cohorts(tmp_path: Path) -> None:
    settings = merged({"tasks": {"count": 1, "rounds": 3}})
    whole = run(tmp_path, "whole", settings, cohort=4)["model_sha256"]
    path = tmp_path / "stopped.yaml"
    path.write_text(yaml.safe_dump(settings))
    chosen: Any = {"name": "stopped", "runs": str(tmp_path / "runs"), "device": "cpu"}

    def stop(event: dict[str, Any]) -> None:
        if event.get("round") == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_process(RunSettings(str(path), **chosen), listener=stop, cohort=4)
    resumed = run_in_process(RunSettings(str(path), resume="yes", **chosen))
    assert resumed["cohort"] == 4 and resumed["model_sha256"] == whole


def test_a_site_at_fault_fails_alone(tmp_path: Path) -> None:
    # with sign -1 a site needs samples of every class, which not every site has
    faulty = {"classification": {"name": "balanced_softmax", "sign": -1}}
    settings = merged({"learner": faulty, "rounds": {"quorum": 1}})
    alone, together = run(tmp_path, "alone", settings), run(tmp_path, "together", settings, cohort=5)
    refused = [name for name, site in alone["sites"].items() if site["refused"]]
    assert 0 < len(refused) < 5
    assert alone["sites"] == together["sites"]


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 3),
        ({"data": {"sites": 20}}, 10),
        ({"data": {"sites": 20}, "rounds": {"fraction": 0.5}}, 5),
        ({"data": {"sites": 60, "samples_limit": 1797, "partition": {"kind": "iid"}}}, LARGEST),
        ({"learner": {"batch_size": 64}, "data": {"sites": 20}}, 4),
        ({"learner": {"batch_size": 512}}, 1),
    ],
)
def test_auto_follows_from_the_experiment(changes: dict[str, Any], size: int) -> None:
    assert plan_cohorts(Experiment.model_validate(merged(changes)), "auto").size == size


def test_a_late_or_damaged_row_of_a_matrix_is_one_site_s_alone() -> None:
    set_task_identity()
    names = ["linz", "graz", "wels"]
    requests = asked([1, 2, 3])
    for number, request in enumerate(requests):
        request.metadata.__dict__["_message_id"] = f"m-{number}"
    rows = torch.tensor([[1.0, 2.0, 3.0], [4.0, float("nan"), 0.0], [7.0, 8.0, 9.0]])
    model = {"weight": torch.zeros(1, 2), "bias": torch.zeros(1)}
    replies = [
        TrainReply(**STAMP, update=Tensors(weight=row[:2].view(1, 2), bias=row[2:]), num_examples=5 + place)
        for place, row in enumerate(rows)
    ]
    stack = Stack(requests, replies, rows)
    gate = Gate(model, Stamp(**STAMP), max_update_norm=10.0, max_samples=5)
    passed, apart = gate.admit_stack(stack, names)
    assert [reply.site for reply in passed] == ["linz"] and apart == [1, 2]
    assert passed[0].norm == Tensors(passed[0].update).norm
    with pytest.raises(Rejected, match="tensor 'weight': holds NaN"):
        gate.admit(stack.split_off(1), "graz")
    with pytest.raises(Rejected, match=r"norm 13.9\d* is above max_update_norm 10"):
        gate.admit(stack.split_off(2), "wels")
    assert gate.admit_stack(stack, names)[1] == [0, 1, 2], "a site counts once in a round"
    assert Gate(model, Stamp(**{**STAMP, "round": 2})).admit_stack(stack, names) == ([], [0, 1, 2])
    exchange = Exchange(owed={f"m-{n}": Owed(names[n], 1e18, update=True) for n in (0, 1, 2)})
    assert exchange._let_in([Message(stack, reply_to=requests[0])])
    assert [site for site, _ in exchange.late] == names and not exchange.owed
    crossed = [bytes(frame) for frame in encode_frames(stack)]
    there = decode_frames(iter(crossed).__next__, {f"m-{n}": request for n, request in enumerate(requests)})
    assert isinstance(there, Stack) and torch.equal(there.rows.nan_to_num(), rows.nan_to_num())
    assert [reply.num_examples for reply in there.replies] == [5, 6, 7]
    assert torch.equal(there.replies[2].update["weight"], replies[2].update["weight"])


# the grids


STAMP = {
    "run": "0" * 16,
    "experiment": "e" * 64,
    "class_order": "c" * 64,
    "task": 1,
    "round": 1,
    "num_classes": 2,
}


def together(messages: list[Message], contexts: list[Context]) -> list[Message]:
    nodes = sorted(context.node_id for context in contexts)
    assert len(nodes) > 1
    return [Message(RecordDict(), reply_to=message) for message in messages]


def asked(nodes: list[int], training: bool = True) -> list[Message]:
    kind = TrainRequest if training else EvaluateRequest
    request = kind(**STAMP, arrays=Tensors(weight=torch.zeros(1)))
    return [Message(request.record, node, request.message_type) for node in nodes]
