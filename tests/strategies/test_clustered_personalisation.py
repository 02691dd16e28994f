"""Whole small runs of FedPerC: what crosses the wire, what clusters share, and what comes of extreme
settings."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from perennial.config.run import RunSettings
from perennial.foundation.errors import PrivacyError
from perennial.protocol.fields import read_kind
from perennial.protocol.messages import TrainReply
from perennial.protocol.tensors import Tensors, hash_tensors
from tests.strategies.personal_runs import GROUPS, equal, go, run


def test_personal_layers_never_leave_and_clusters_share_the_rest(tmp_path: Path) -> None:
    done = run(tmp_path)
    labels = done.summary["personalisation"]["members"]
    updates = [m.content.array_records["update"] for m in done.sent if read_kind(m.content) == "TrainReply"]
    whole = {"backbone.layers.1.weight", "backbone.layers.1.bias", "head.weight", "head.bias"}
    shared = {name for name in whole if not name.startswith("head")}
    assert [set(update) for update in updates] == 4 * [whole] + 8 * [shared]
    kinds = {read_kind(message.content): message.content for message in done.sent}
    assert {*kinds} == {"DescribeReply", "SparsityReply", "TrainReply", "PersonalModelReply", "EvaluateReply"}
    # tables are counts of answers on held-out samples
    arrays = {name for record in kinds.values() for name in record.array_records}
    assert arrays == {"update", "vector", "tables"}
    models = {site: done.own(site) for site in labels}
    for site, model in models.items():
        cluster = done.cluster(labels[site])
        assert cluster.keys() == shared
        assert all(torch.equal(model[name], cluster[name]) for name in shared)
    heads = [model["head.weight"] for model in models.values()]
    assert not any(torch.equal(a, b) for i, a in enumerate(heads) for b in heads[:i])
    assert done.summary["clusters"].keys() == done.summary["personalised_accuracy"].keys() == labels.keys()
    assert "Sites by likeness" in (done.folder / "report.html").read_text()


def test_global_rounds_come_after_those_of_pre_training_in_the_first_task_and_alone_in_others(
    tmp_path: Path,
) -> None:
    tasks = {"count": 2, "rounds": 3}
    done = run(tmp_path, tasks=tasks, pretraining={"samples": 8, "rounds": 2})
    updates = [m.content.array_records["update"] for m in done.sent if read_kind(m.content) == "TrainReply"]
    # two of pre-training, a global one and two in clusters; then a global one and two in clusters
    whole = [len(update) == 4 for update in updates]
    assert whole == 12 * [True] + 8 * [False] + 4 * [True] + 8 * [False]
    assert sum(read_kind(m.content) == "PersonalModelReply" for m in done.sent) == 2 * 4
    assert done.summary["personalised_accuracy"].keys() == done.summary["clusters"].keys()


def test_a_cluster_is_the_weighted_mean_of_its_members_and_of_nobody_else(tmp_path: Path) -> None:
    updates: dict[str, tuple[int, dict[str, Tensor]]] = {}

    def listen(site: str, reply: TrainReply) -> TrainReply:
        updates[site] = reply.num_examples, dict(reply.update)
        return reply

    def loud(site: str, reply: TrainReply) -> TrainReply:
        if site != "site-3" or reply.round == 1:
            return reply
        louder = {name: 2 * tensor for name, tensor in reply.update.items()}
        return TrainReply(**{**vars(reply), "update": Tensors(louder)})

    quiet = run(tmp_path / "quiet", listen, GROUPS, tasks={"count": 1, "rounds": 2})
    disturbed = run(tmp_path / "loud", loud, GROUPS, tasks={"count": 1, "rounds": 2})
    assert equal(quiet.cluster(0), disturbed.cluster(0))
    assert not equal(quiet.cluster(1), disturbed.cluster(1))
    start = load_file(quiet.folder / "model.safetensors")
    total = sum(updates[site][0] for site in ("site-0", "site-1"))
    for name, tensor in quiet.cluster(0).items():
        moved = sum(updates[site][0] * updates[site][1][name] for site in ("site-0", "site-1")) / total
        assert torch.allclose(tensor, start[name] + moved, atol=1e-6)


def test_one_cluster_that_shares_everything_is_the_base_strategy(tmp_path: Path) -> None:
    everything = {"clusters": 1, "grouping": "random", "personal": [], "global_rounds": 0}
    done = run(tmp_path / "clustered", strategy=everything)
    plain = run(tmp_path / "plain", strategy="fedavg")
    assert hash_tensors(done.own("site-0")) == plain.summary["model_sha256"]


def test_an_interrupted_run_goes_on_to_the_same_personal_models(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", tasks={"count": 1, "rounds": 4})

    def fail_late(site: str, reply: TrainReply) -> TrainReply:
        if reply.round == 3 and site == "site-2":
            raise KeyboardInterrupt
        return reply

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", fail_late, tasks={"count": 1, "rounds": 4})
    settings = RunSettings(
        str(tmp_path / "cut" / "experiment.yaml"), runs=str(tmp_path / "cut" / "runs"), resume="yes"
    )
    again = go(settings)
    assert again.summary["personalised_accuracy"] == whole.summary["personalised_accuracy"]
    for site in ("site-0", "site-2", "site-3"):
        assert equal(again.own(site), whole.own(site))


def test_a_site_that_refuses_or_lies_stays_without_cluster(tmp_path: Path) -> None:
    def widened(site: str, reply: TrainReply) -> TrainReply:
        if site != "site-1" or reply.round == 1:
            return reply
        return TrainReply(**{**vars(reply), "update": Tensors(reply.update, **{"head.bias": torch.ones(10)})})

    done = run(tmp_path, widened)
    dropped = done.events("round")[1]["dropped"]
    assert [entry["site"] for entry in dropped] == ["site-1"]
    assert "head.bias" in dropped[0]["reason"]


def test_vectors_without_noise_are_refused_where_a_guarantee_is_claimed(tmp_path: Path) -> None:
    private = {
        "privacy": {"mode": "client_local", "clip_norm": 1.0, "noise_multiplier": 1.0},
        "evaluation": {"federated": False},
    }
    with pytest.raises(PrivacyError, match="sparsity vector would leave without a proven guarantee"):
        run(tmp_path / "bare", **private)
    with pytest.raises(PrivacyError, match="hides one sample, while this mode claims to hide a whole site"):
        run(tmp_path / "noised", strategy={"sparsity_epsilon": 1.0}, **private)
    done = run(tmp_path / "given", strategy=GROUPS, **private)
    assert "personalised_accuracy" not in done.summary
    assert not any(read_kind(message.content) == "SparsityReply" for message in done.sent)


def test_noised_vectors_are_charged_to_the_ledger(tmp_path: Path) -> None:
    from perennial.privacy.ledger import Ledger

    done = run(tmp_path, strategy={"sparsity_epsilon": 2.0, "clusters": 2})
    (entry,) = Ledger(done.folder / "sites" / "site-0").read_entries()
    assert (entry.kind, entry.unit, entry.mechanism) == ("sparsity", "sample", "gaussian")
    cost = Ledger(done.folder / "sites" / "site-0").cost(1e-5)
    assert cost.epsilon == pytest.approx(2.0, abs=0.05)
