"""FedPer, PFA and what they come to; SCAFFOLD and batch normalisation beside personal layers; bytes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from perennial.foundation.errors import ConfigError
from perennial.models.sum_grid import SumGrid
from perennial.protocol.fields import read_kind
from perennial.protocol.tensors import hash_tensors
from perennial.strategies.factory import build_strategy
from perennial.strategies.round import context
from tests.strategies.personal_runs import GROUPS, Run, equal, run

SITES = [f"site-{number}" for number in range(4)]


def same_models(one: Run, other: Run) -> bool:
    return all(equal(one.own(site), other.own(site)) for site in SITES)


def test_one_cluster_found_by_vectors_is_fedper(tmp_path: Path) -> None:
    fedper = run(tmp_path / "fedper", strategy="fedper")
    one = run(tmp_path / "one", strategy={"clusters": 1, "global_rounds": 0})
    assert same_models(fedper, one)
    assert not any(read_kind(message.content) == "SparsityReply" for message in fedper.sent)


def test_fedper_averages_the_shared_layers_by_samples_and_keeps_heads_from_the_first_round(
    tmp_path: Path,
) -> None:
    changes: list[tuple[int, dict[str, torch.Tensor]]] = []

    def listen(site: str, reply: Any) -> Any:
        changes.append((reply.num_examples, dict(reply.update)))
        return reply

    done = run(tmp_path, listen, "fedper", tasks={"count": 1, "rounds": 1})
    total = sum(samples for samples, _ in changes)
    start = load_file(done.folder / "model.safetensors")
    assert done.cluster(0).keys() == {"backbone.layers.1.weight", "backbone.layers.1.bias"}
    for name, tensor in done.cluster(0).items():
        mean = sum(samples * update[name] for samples, update in changes) / total
        assert torch.allclose(tensor, start[name] + mean, atol=1e-6)
    heads = [done.own(site)["head.weight"] for site in SITES]
    assert not any(torch.equal(a, b) for i, a in enumerate(heads) for b in heads[:i])


def test_whole_models_inside_a_group_are_fedavg_of_its_members_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped = run(tmp_path / "grouped", strategy=GROUPS | {"personal": [], "global_rounds": 0})
    away = [{"site": site, "first_round": 1, "last_round": 3} for site in ("site-2", "site-3")]
    # twice the norm for half the sites that a sum has to hold: the same steps of its grid, so the same bits
    monkeypatch.setattr(context, "SumGrid", partial(SumGrid, largest_norm=2048.0))
    alone = run(tmp_path / "alone", strategy="fedavg", absence=away)
    assert hash_tensors(grouped.own("site-1")) == alone.summary["model_sha256"]
    assert not equal(grouped.own("site-1"), grouped.own("site-2"))


def test_pfa_shares_whole_models_among_near_sites(tmp_path: Path) -> None:
    named = run(tmp_path / "named", strategy={"name": "pfa", "global_rounds": 1, "layer": 1, "channels": 8})
    settings = {"grouping": "threshold", "personal": [], "combine": "last"}
    assert same_models(named, run(tmp_path / "settings", strategy=settings))
    labels = named.summary["personalisation"]["members"]
    for site in SITES:
        assert equal(named.own(site), named.cluster(labels[site]))


@pytest.mark.parametrize(
    ("name", "keys", "reason"),
    [
        ("fedper", {"personal": []}, "personal: found no layer, which is FedAvg"),
        ("fedper", {"clusters": 2}, "unknown key 'clusters'"),
        ("pfa", {"global_rounds": 1}, "pfa needs layer"),
        ("pfa", {"global_rounds": 1, "layer": 0}, "layer: found 0"),
    ],
)
def test_wrong_settings_are_named(name: str, keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build_strategy(name, keys)
