"""FedDig inside clusters: stand-ins serve their own cluster alone, and layers of the sites stay theirs."""

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from flwr.app import Context, Message, RecordDict

from perennial.client.app import app as client_app
from perennial.config.run import RunSettings
from perennial.engine.grid import InProcessGrid, build_site_contexts
from perennial.engine.run import run_in_process
from perennial.server.app import serve
from perennial.server.checkpoint import load_checkpoint
from perennial.strategies.digest_synthesis.method import DigestSynthesis
from perennial.strategies.digest_synthesis.recall import ServerNetworks
from perennial.strategies.fedavg import FedAvg
from tests.client.test_digest_lending import WithdrawingGrid

SITES = [f"site-{number}" for number in range(4)]
FEDDIG = {"name": "digest_synthesis", "base": "fedavg"}
GROUPS = [SITES[:2], SITES[2:]]
CLUSTERS: dict[str, Any] = {
    "name": "clustered_personalisation",
    "base": FEDDIG,
    "global_rounds": 1,
    "grouping": "fixed",
    "groups": GROUPS,
}
EXPERIMENT: dict[str, Any] = {
    "name": "small",
    "seed": 3,
    "data": {"source": "digits", "sites": 4, "samples_limit": 240, "partition": {"kind": "iid"}},
    "tasks": {"count": 1, "rounds": 4},
    "model": {"name": "digest_two_branch", "backbone": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05, "momentum": 0.9}},
    "strategy": CLUSTERS,
    "digests": {"per_digest": 2},
    "absence": [{"site": "site-1", "first_round": 3, "last_round": 3}],
    "evaluation": {"federated": False},
}


def settings(folder: Path, runs: str = "runs", **changes: Any) -> RunSettings:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT | changes))
    return RunSettings(str(path), runs=str(folder / runs))


def clusters(**changes: Any) -> dict[str, Any]:
    return {"strategy": CLUSTERS | changes}


def events_of(folder: Path, runs: str = "runs") -> list[dict[str, Any]]:
    lines = (folder / runs / "small" / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def rounds_of(folder: Path, runs: str = "runs") -> list[dict[str, Any]]:
    return [event for event in events_of(folder, runs) if event["event"] == "round"]


def cluster_model(folder: Path, cluster: int, runs: str = "runs") -> dict[str, torch.Tensor]:
    checkpoint, _ = load_checkpoint(folder / runs / "small" / "checkpoint")
    start = f"model-{cluster}/"
    return {
        name.removeprefix(start): tensor
        for name, tensor in checkpoint.strategy.items()
        if name.startswith(start)
    }


@pytest.mark.parametrize("tasks", [1, 2])
def test_one_cluster_that_shares_everything_is_feddig(tmp_path: Path, tasks: int) -> None:
    one = clusters(grouping="random", groups=None, clusters=1, personal=[], global_rounds=0)
    rounds: dict[str, Any] = {"tasks": {"count": tasks, "rounds": 4 // tasks}}
    run_in_process(settings(tmp_path, **one, **rounds))
    run_in_process(settings(tmp_path, "plain", strategy=FEDDIG, **rounds))
    plain, _ = load_checkpoint(tmp_path / "plain" / "small" / "checkpoint")
    inside = cluster_model(tmp_path, 0)
    assert inside.keys() == plain.arrays.keys()
    assert all(torch.equal(inside[name], tensor) for name, tensor in plain.arrays.items())


@pytest.mark.parametrize("goes_on", [True, False])
def test_guidance_and_own_layers_begin_as_those_of_the_task_before_or_of_all_sites(goes_on: bool) -> None:
    whole, former, group = (DigestSynthesis(FedAvg()) for _ in range(3))
    lending: Any = SimpleNamespace(withdrawals=0)
    for seed, strategy in enumerate((whole, former, group)):
        run: Any = SimpleNamespace(
            input_shape=(5,), experiment=SimpleNamespace(seed=seed), device=torch.device("cpu")
        )
        strategy.networks = ServerNetworks(run, lending)
    former.networks.own = {"head.weight": torch.ones(2, 3)}
    group.serve_group(whole, {"head.weight": torch.zeros(3, 3)}, former if goes_on else None)
    rows = group.networks.own["head.weight"].sum(dim=1).tolist()
    assert rows == ([3.0, 3.0, 0.0] if goes_on else [0.0, 0.0, 0.0])
    source = (former if goes_on else whole).networks.guidance.state_dict()
    assert all(
        torch.equal(source[name], tensor) for name, tensor in group.networks.guidance.state_dict().items()
    )


@pytest.mark.parametrize("personal", [[], ["head"]], ids=["whole models", "heads at the sites"])
def test_an_absent_site_is_stood_in_for_in_its_own_cluster_alone(tmp_path: Path, personal: list[str]) -> None:
    summary: dict[str, Any] = run_in_process(settings(tmp_path, **clusters(personal=personal)))
    details = rounds_of(tmp_path)[2]["details"]["in_clusters"]
    assert {cluster: list(facts["digests"]["stood_in"]) for cluster, facts in details.items()} == {
        "0": ["site-1"],
        "1": [],
    }
    assert {cluster: facts["digests"]["sites"] for cluster, facts in details.items()} == {
        "0": SITES[:2],
        "1": SITES[2:],
    }
    # what the other cluster does not see: neither the absence nor the digests of these sites
    run_in_process(settings(tmp_path, "there", absence=[], **clusters(personal=personal)))
    for cluster, same in ((0, False), (1, True)):
        one, other = (cluster_model(tmp_path, cluster, runs) for runs in ("runs", "there"))
        assert all(torch.equal(one[name], other[name]) for name in one) == same
        assert not any(name.startswith("head") for name in one) or not personal
    rounds = {site: facts["rounds_stood_in"] for site, facts in summary["digest"]["sites"].items()}
    assert rounds == dict.fromkeys(SITES, 0) | {"site-1": 1}


def test_digests_are_lent_once_for_the_global_and_the_personal_rounds(tmp_path: Path) -> None:
    asked: list[str] = []

    class Listening(InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            sent = list(messages)
            asked.extend(m.metadata.message_type for m in sent)
            return super().push_messages(sent)

    run_config = dict(vars(settings(tmp_path)))
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run_config)
    serve(Listening(client_app, build_site_contexts(4, run_config)), context, "in-process")
    assert asked.count("query.digest") == 4


def test_the_servers_own_layers_are_trained_and_stay_at_the_server(tmp_path: Path) -> None:
    run_in_process(settings(tmp_path))
    checkpoint, _ = load_checkpoint(tmp_path / "runs" / "small" / "checkpoint")
    own = {
        name: tensor for name, tensor in checkpoint.strategy.items() if name.startswith("aggregator-0/own/")
    }
    assert {name.rpartition("/")[2] for name in own} == {"head.weight", "head.bias"}
    for name, tensor in own.items():
        assert not torch.equal(tensor, checkpoint.arrays[name.rpartition("/")[2]])
    copies = [name for name in checkpoint.strategy if "digest/0/features" in name]
    assert copies == ["base/digest/0/features"]


def test_a_withdrawal_in_one_cluster_ends_what_every_cluster_has_learnt_from_the_digests(
    tmp_path: Path,
) -> None:
    run_config = dict(vars(settings(tmp_path, tasks={"count": 1, "rounds": 2}, absence=[])))
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run_config)
    summary = serve(WithdrawingGrid(client_app, build_site_contexts(4, run_config)), context, "in-process")
    assert summary["digest"]["withdrawn"] == ["site-1"]
    details = rounds_of(tmp_path)[1]["details"]["in_clusters"]
    assert details["0"]["digests"]["sites"] == ["site-0"]
    assert sum("site-1 has withdrawn" in event.get("text", "") for event in events_of(tmp_path)) == 1
    checkpoint, _ = load_checkpoint(tmp_path / "runs" / "small" / "checkpoint")
    assert checkpoint.strategy["aggregator-0/withdrawals"] == 1
    assert checkpoint.strategy["aggregator-1/withdrawals"] == 1
    assert checkpoint.strategy["base/withdrawals"] == 1
