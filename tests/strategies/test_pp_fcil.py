"""PP-FCIL in whole small runs: what travels, what is told, late replies, and what is refused."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from flwr.app import Context, Message, RecordDict

from perennial.client.app import app as client_app
from perennial.config.run import RunSettings
from perennial.engine.grid import InProcessGrid, build_site_contexts
from perennial.engine.run import run_in_process
from perennial.foundation.errors import PrivacyError, ProtocolError
from perennial.foundation.streams import stream
from perennial.learning.batches import TrainingSet
from perennial.learning.objective import FrozenOutputs
from perennial.models.config import ModelConfig
from perennial.models.dual_backbone import DualBackboneModel
from perennial.models.factory import build_model
from perennial.models.incremental import IncrementalModel, complete_state
from perennial.server.app import serve
from perennial.server.summary import extract_hashes

SMALL: dict[str, Any] = {
    "name": "small",
    "seed": 2,
    "data": {"source": "digits", "sites": 3, "samples_limit": 240, "partition": {"kind": "iid"}},
    "tasks": {"count": 3, "rounds": 2},
    "model": {"name": "dual_backbone", "backbone": "mlp", "hidden": [16]},
    "learner": {
        "preset": "none",
        "optimizer": {"lr": 0.05},
        "classification": "balanced_softmax",
        "distillation": {},
        "contrastive": {},
        "memory": {"per_class": 2},
    },
    "strategy": {"name": "multi_factor", "alpha": 0.7, "beta": 0.1, "gamma": 0.1, "delta": 0.1},
}


def write(folder: Path, **changes: Any) -> str:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    return str(path)


class WatchedGrid(InProcessGrid):
    """Remembers each training request and reply; holds back the replies of one node for one round."""

    def __init__(self, run_config: dict[str, Any], late: tuple[int, int] | None = None) -> None:
        super().__init__(client_app, build_site_contexts(3, run_config))
        self.requests: list[Message] = []
        self.replies: list[Message] = []
        self._late, self._held = late, []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.requests += [m for m in messages if m.metadata.message_type == "train"]
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        request = self._queue[0] if self._queue else None
        arrived = list(super().pull_messages(message_ids))
        if request is None or request.metadata.message_type != "train":
            return arrived
        self.replies += arrived
        number = request.content.config_records["fields"]["round"]
        if (request.metadata.dst_node_id, number) == self._late:
            self._held, arrived = arrived, []
        elif self._late and number == self._late[1] + 1:
            arrived, self._held = [*self._held, *arrived], []
        return arrived


def run(folder: Path, late: tuple[int, int] | None = None, **changes: Any) -> tuple[WatchedGrid, list[Any]]:
    run_config = dict(vars(RunSettings(write(folder, **changes), runs=str(folder / "runs"))))
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run_config)
    grid = WatchedGrid(run_config, late)
    serve(grid, context, "in-process")
    lines = (folder / "runs" / "small" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return grid, [event for event in events if event["event"] == "round"]


def test_the_frozen_part_travels_at_most_once_and_no_part_of_it_comes_back(tmp_path: Path) -> None:
    grid, rounds = run(tmp_path)
    assert len(rounds) == 6
    for request in grid.requests:
        fields, arrays = request.content.config_records["fields"], request.content.array_records
        # every site was there when the task before ended, and kept its model: nobody needs it sent
        assert "previous_arrays" not in arrays
        assert bool(fields["previous"]) == (int(str(fields["task"])) > 1)
        assert not any(key.startswith("old_backbone.") for key in arrays["arrays"])
        assert any(key.startswith("gate.") for key in arrays["arrays"]) == (int(str(fields["task"])) > 1)
    for reply in grid.replies:
        assert not any(key.startswith("old_backbone.") for key in reply.content.array_records["update"])
    assert rounds[0]["bytes_down"] < rounds[2]["bytes_down"] == rounds[3]["bytes_down"]


def test_a_site_that_was_away_gets_the_frozen_part_once(tmp_path: Path) -> None:
    away = [{"site": "site-1", "first_round": 2, "last_round": 2}]
    grid, _ = run(tmp_path, tasks={"count": 2, "rounds": [2, 3]}, absence=away)
    sent = [
        (request.metadata.dst_node_id, request.content.config_records["fields"]["round"])
        for request in grid.requests
        if "previous_arrays" in request.content.array_records
    ]
    assert sent == [(2, 3)], "node 2 is site-1, and round 3 its first after the task ended without it"


def test_sites_tell_what_the_weights_need_and_the_journal_says_the_weights(tmp_path: Path) -> None:
    grid, rounds = run(tmp_path, tasks={"count": 1, "rounds": 1})
    for reply in grid.replies:
        told = json.loads(str(reply.content.config_records["fields"]["metrics"]))
        assert set(told) == {"held_out_accuracy", "classification_loss"}
        assert 0 <= told["held_out_accuracy"] <= 1 and told["classification_loss"] > 0
    weights = rounds[0]["details"]["weights"]
    assert list(weights) == ["site-0", "site-1", "site-2"]
    assert sum(weights.values()) == pytest.approx(1.0, abs=1e-5)


def test_a_late_reply_counts_in_the_next_round_with_less_weight(tmp_path: Path) -> None:
    recency = {"name": "multi_factor", "alpha": 0, "beta": 1, "gamma": 0, "delta": 0}
    grid, rounds = run(
        tmp_path, (2, 1), tasks={"count": 1, "rounds": 3}, strategy=recency, rounds={"deadline": 0.4}
    )
    assert rounds[0]["absent"] == ["site-1"]
    asked_in_round_2 = [m for m in grid.requests if m.content.config_records["fields"]["round"] == 2]
    assert [m.metadata.dst_node_id for m in asked_in_round_2] == [1, 3], "site-1 still works on round 1"
    weights = rounds[1]["details"]["weights"]
    assert weights["site-1"] / weights["site-0"] == pytest.approx(0.606531, rel=1e-4)
    assert rounds[1]["participants"] == ["site-0", "site-1", "site-2"]
    assert not rounds[1]["absent"] and not rounds[1]["dropped"]
    assert len(set(rounds[2]["details"]["weights"].values())) == 1


@pytest.mark.parametrize(("keys", "allowed"), [({}, True), ({"gamma": 0.1}, False), ({"delta": 0.1}, False)])
def test_weights_from_told_figures_are_refused_under_privacy(
    tmp_path: Path, keys: dict[str, Any], allowed: bool
) -> None:
    experiment = write(
        tmp_path,
        tasks={"count": 1, "rounds": 1},
        strategy={"name": "multi_factor", **keys},
        privacy={
            "mode": "client_local",
            "clip_norm": 1.0,
            "noise_multiplier": 0.01,
        },
        evaluation={"federated": False},
    )
    settings = RunSettings(experiment, runs=str(tmp_path / "runs"))
    if allowed:
        assert run_in_process(settings)["epsilon"]["value"] > 0  # pyright: ignore[reportIndexIssue]
    else:
        with pytest.raises(PrivacyError, match="aggregation weights use loss or accuracy"):
            run_in_process(settings)


# the frozen past


def past_models(classes: int = 4) -> tuple[DualBackboneModel, IncrementalModel]:
    config = ModelConfig(name="dual_backbone", backbone="mlp", hidden=(8,))
    teacher = build_model(config, (1, 8, 8), 2, seed=1)
    previous = {name: value.clone() for name, value in complete_state(teacher).items()}
    model = build_model(config, (1, 8, 8), 2, seed=1)
    model.grow(classes, stream(1, "head", 2))
    model.begin_task(previous)
    assert isinstance(model, DualBackboneModel)
    return model, teacher.eval().requires_grad_(False)


def training_set(count: int = 12) -> TrainingSet:
    x = torch.randint(0, 256, (count, 1, 8, 8), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return TrainingSet(x, torch.arange(count) % 4, torch.zeros(1), torch.ones(1))


def test_the_past_is_the_same_remembered_or_computed() -> None:
    model, teacher = past_models()
    data, rows = training_set(), torch.tensor([5, 0, 7])
    with torch.no_grad():
        for parameter in model.backbone.parameters():
            parameter.add_(0.1)
    expected_logits = teacher(data.inputs(rows))
    for augmented in (False, True):
        features, logits, _ = FrozenOutputs(model, teacher, data, augmented).answer_batch(
            rows, data.inputs(rows)
        )
        torch.testing.assert_close(features, model.features(data.inputs(rows)))
        assert logits is not None
        # in the second task the old backbone with the old head is the whole model of the task before
        torch.testing.assert_close(logits, expected_logits)


def test_the_past_must_be_frozen_and_know_less() -> None:
    model, teacher = past_models()
    with pytest.raises(ProtocolError, match="teacher: found parameters"):
        FrozenOutputs(model, teacher.requires_grad_(True), training_set(), True)
    teacher.requires_grad_(False)
    assert model.old_backbone is not None
    model.old_backbone.requires_grad_(True)
    with pytest.raises(ProtocolError, match="old backbone: found parameters"):
        FrozenOutputs(model, teacher, training_set(), True)
    model.old_backbone.requires_grad_(False)
    wide, _ = past_models()
    with pytest.raises(ProtocolError, match="a head of 4 classes"):
        FrozenOutputs(model, wide.requires_grad_(False), training_set(), True)


@pytest.mark.slow
def test_workers_and_a_resumed_run_give_the_same_bits(tmp_path: Path) -> None:
    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 3:
            raise KeyboardInterrupt

    # a site that is capped in every round, so that kept updates are part of the sum
    uneven = {"kind": "dirichlet", "alpha": 0.1, "min_samples": 5}
    experiment = write(
        tmp_path,
        data=SMALL["data"] | {"partition": uneven},
        strategy={
            "name": "multi_factor",
            "alpha": 0.7,
            "beta": 0.1,
            "gamma": 0.1,
            "delta": 0.1,
        },
    )
    whole = run_in_process(RunSettings(experiment, runs=str(tmp_path / "whole")))
    spread = run_in_process(RunSettings(experiment, runs=str(tmp_path / "spread")), workers=2)
    with pytest.raises(KeyboardInterrupt):
        run_in_process(RunSettings(experiment, runs=str(tmp_path / "stopped")), listener=stop)
    resumed = run_in_process(RunSettings(experiment, runs=str(tmp_path / "stopped"), resume="yes"))
    assert extract_hashes(spread) == extract_hashes(whole) == extract_hashes(resumed)
