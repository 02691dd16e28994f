"""FedDig: who stands in for whom, what stays durable, and what a lying site cannot do."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from perennial.config.learner import Optimizer
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError, ProtocolError, StateError
from perennial.foundation.streams import stream
from perennial.models.config import ModelConfig
from perennial.models.digest_networks import DigestTwoBranchModel, GuidanceProducer
from perennial.models.factory import build_model
from perennial.models.incremental import select_travelling
from perennial.protocol.messages import DigestReply
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import Tensors
from perennial.server.summary import extract_hashes
from perennial.strategies.digest_synthesis.method import DigestSynthesis
from perennial.strategies.digest_synthesis.recall import Recall
from perennial.strategies.digest_synthesis.store import DigestStore, check_digest_reply
from perennial.strategies.fedavg import FedAvg
from perennial.strategies.round.gate import Admitted
from tests.rounds import begun

STAMP = Stamp(run="0" * 16, experiment="e" * 64, class_order="c" * 64, task=1, round=4, num_classes=4)
SHAPE = (4, 4, 4)
EXPERIMENT: dict[str, Any] = {
    "name": "small",
    "seed": 3,
    "data": {"source": "digits", "sites": 3, "samples_limit": 240, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 3},
    "model": {"name": "digest_two_branch", "backbone": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05, "momentum": 0.9}},
    "strategy": {"name": "digest_synthesis", "base": "fedavg"},
    "digests": {"per_digest": 2},
    "absence": [{"site": "site-1", "first_round": 2, "last_round": 4}],
    "evaluation": {"federated": False},
}


def write(folder: Path, **changes: Any) -> str:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT | changes))
    return str(path)


def run(folder: Path, runs: str = "runs", **changes: Any) -> dict[str, Any]:
    return run_in_process(RunSettings(write(folder, **changes), runs=str(folder / runs)))


def rounds_of(folder: Path, runs: str = "runs") -> list[dict[str, Any]]:
    lines = (folder / runs / "small" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "round"]


# one round, without a server


def reply(site: str, value: float, num_examples: int) -> Admitted:
    update = {"w": torch.full((3,), value)}
    return Admitted(site, update, float(update["w"].norm()), num_examples)


def aggregate(strategy: FedAvg | DigestSynthesis, replies: list[Admitted]) -> torch.Tensor:
    round_ = begun(strategy, {"w": torch.tensor([0.1, 0.2, 0.3])})
    for one in replies:
        round_.add(one)
        round_.ctx.outcome.participants[one.site] = one
    assert round_.complete()
    return round_.result()["w"]


def test_with_nobody_absent_it_is_the_base_with_uniform_weights() -> None:
    replies = [reply("a", 0.3, 10), reply("b", -0.1, 70)]
    alike = [replace(one, num_examples=1) for one in replies]
    assert torch.equal(aggregate(DigestSynthesis(FedAvg()), replies), aggregate(FedAvg(), alike))


# whole runs


def test_an_absent_site_is_stood_in_for_and_one_that_returns_is_not(tmp_path: Path) -> None:
    summary = run(tmp_path)
    stood_in = [list(event["details"]["digests"]["stood_in"]) for event in rounds_of(tmp_path)]
    assert stood_in == [[], ["site-1"], ["site-1"], ["site-1"], [], []]
    assert all(len(event["participants"]) == 3 for event in rounds_of(tmp_path)[4:])
    block = summary["digest"]
    assert block["sites"]["site-1"]["rounds_stood_in"] == 3
    # site-1 was away when task 2 began, and lends that task's digests when it is back
    assert {site: facts["tasks"] for site, facts in block["sites"].items()} == {
        f"site-{number}": [1, 2] for number in range(3)
    }
    assert block["epsilon_of_one_sample"] == "infinite"


def test_a_site_that_has_lent_nothing_is_not_stood_in_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = [{"site": "site-1", "first_round": 1}]
    strategy = {"name": "digest_synthesis", "base": "fedavg", "server_epochs": 0}
    with_digests = run(tmp_path, absence=gone, strategy=strategy)
    monkeypatch.setattr(FedAvg, "weight", lambda self, reply: 1.0)
    base = run(tmp_path, runs="base", absence=gone, strategy="fedavg", digests=None)
    assert extract_hashes(with_digests) == extract_hashes(base)
    assert with_digests["digest"]["sites"].keys() == {"site-0", "site-2"}


def test_a_run_goes_on_when_everybody_has_left(tmp_path: Path) -> None:
    gone = [{"site": f"site-{number}", "first_round": 2} for number in range(3)]
    run(tmp_path, absence=gone, tasks={"count": 1, "rounds": 4}, rounds={"max_skipped": 1})
    assert [len(event["participants"]) for event in rounds_of(tmp_path)] == [3, 0, 0, 0]
    assert not any(event["skipped"] for event in rounds_of(tmp_path))
    with pytest.raises(StateError, match="times in a row without"):
        run(tmp_path, runs="base", absence=gone, strategy="fedavg", digests=None, rounds={"max_skipped": 1})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"digests": None}, "digests: missing"),
        ({"model": {"name": "mlp"}}, "reads digests with digest_two_branch"),
        ({"learner": {"preset": "none", "optimizer": {"name": "adam", "lr": 0.01}}}, "trains with sgd"),
    ],
)
def test_an_experiment_that_cannot_make_or_read_digests_is_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        run(tmp_path, **changes)


# the server's networks


def networks() -> Recall:
    model = build_model(
        ModelConfig.model_validate({"name": "digest_two_branch", "backbone": "small_cnn"}),
        (1, 8, 8),
        4,
        seed=1,
    )
    assert isinstance(model, DigestTwoBranchModel)
    return Recall(model, GuidanceProducer((1, 8, 8), seed=1), None, batch_size=4)


def digests(count: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.rand(count, 4, generator=generator)
    return torch.rand(count, *SHAPE, generator=generator), labels / labels.sum(1, keepdim=True)


def sgd(lr: float) -> Optimizer:
    return Optimizer(lr=lr, momentum=0.9)


def test_recall_leaves_the_guidance_and_the_encoder_alone_and_the_joint_step_trains_the_guidance() -> None:
    recall = networks()
    reference = {name: tensor.clone() for name, tensor in select_travelling(recall.model).items()}
    encoder = {name: tensor.clone() for name, tensor in recall.model.encoder.state_dict().items()}
    guidance = recall.producer.vector.clone()
    nothing = recall.stand_in(reference, *digests(), 0, sgd(0.1), stream(1, "batches"))
    assert nothing is not None
    assert all(not tensor.any() for tensor in nothing[0].values())
    assert nothing[1:3] == (0.0, 0)
    something = recall.stand_in(reference, *digests(), 2, sgd(0.1), stream(1, "batches"))
    assert something is not None
    assert something[2] == 6
    assert torch.equal(recall.producer.vector, guidance)
    rates = 0.1, 0.1
    assert recall.train_jointly(reference, *digests(), 1, rates, stream(1, "batches")) is not None
    assert not torch.equal(recall.producer.vector, guidance)
    for name, tensor in recall.model.encoder.state_dict().items():
        assert torch.equal(tensor, encoder[name])


# the store


def lent(**changes: Any) -> DigestReply:
    features, labels = digests(5)
    fields: dict[str, Any] = {
        "encoder": "h",
        "samples_per_digest": 4,
        "digests": Tensors(features=features, labels=labels),
    }
    return DigestReply(**STAMP.stamp_fields, **(fields | changes))


def broken(**changes: torch.Tensor) -> Tensors:
    features, labels = digests(5)
    return Tensors({"features": features, "labels": labels} | changes)


NOT_FINITE = digests(5)[0]
NOT_FINITE[2, 1] = torch.nan


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"encoder": "other"}, "encoder: found other, expected h"),
        ({"samples_per_digest": 1}, "samples_per_digest: found 1, expected 4"),
        ({"digests": None}, r"found \[\]"),
        ({"digests": Tensors(features=digests(5)[0])}, r"found \['features'\]"),
        ({"digests": broken(features=torch.rand(5, 4, 4, 3))}, r"features: .*\(5, 4, 4, 3\), expected"),
        ({"digests": broken(features=torch.rand(0, *SHAPE), labels=torch.rand(0, 4))}, "no digest"),
        ({"digests": broken(features=NOT_FINITE)}, "features: .*not finite"),
        ({"digests": broken(labels=torch.rand(5, 3))}, r"labels: .*\(5, 3\)"),
        ({"digests": broken(labels=torch.full((5, 4), 0.3))}, "does not sum to 1"),
        ({"digests": broken(labels=torch.tensor([[1.5, -0.5, 0, 0]] * 5))}, "negative"),
    ],
)
def test_digests_that_are_not_what_they_should_be_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        check_digest_reply(lent(**changes), "h", SHAPE, 4)


def test_the_store_pads_refuses_a_second_release_and_comes_back_from_its_state() -> None:
    store = DigestStore()
    store.put("b", 1, check_digest_reply(lent(), "h", SHAPE, 4))
    with pytest.raises(ProtocolError, match="task 1 already"):
        store.put("b", 1, check_digest_reply(lent(), "h", SHAPE, 4))
    store.put("a/b", 1, check_digest_reply(lent(), "h", SHAPE, 4))
    features, labels = store.gathered(["b", "a/b"], 6)
    assert features.shape == (10, *SHAPE)
    assert labels.shape == (10, 6)
    assert not labels[:, 4:].any()
    model = networks().model
    model.grow(6, stream(1, "head"))
    logits = model.forward_digest(torch.rand(10, 1, 8, 8), features)
    assert torch.nn.functional.cross_entropy(logits, labels).isfinite()
    again = DigestStore()
    again.load_state_dict(
        json.loads(json.dumps({"digests": store.state_dict()["digests"]})) | store.state_dict()
    )
    assert again.samples("b") == 20
    assert torch.equal(again.gathered(["a/b"], 4)[1], labels[:5, :4])
    assert store.drop("b") == 5
    assert store.sites == ["a/b"]
