"""Methods inside one another: whole tiny runs, the same bits after a stop, and what is refused and why."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError, PrivacyError
from perennial.protocol.tensors import hash_tensors
from perennial.server.checkpoint import load_checkpoint
from perennial.strategies.factory import build_strategy

SMALL: dict[str, Any] = {
    "name": "composed",
    "seed": 3,
    "data": {"source": "digits", "sites": 3, "samples_limit": 180, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 3},
    "model": {"name": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "batch_size": 16, "optimizer": {"lr": 0.05}},
    "evaluation": {"federated": False},
}
NOISE = {"clip_norm": 1.0, "noise_multiplier": 1.0, "accountant": "rdp"}
DIGESTS: dict[str, Any] = {
    "model": {"name": "digest_two_branch", "backbone": "mlp", "hidden": [8]},
    "digests": {"per_digest": 2},
    "absence": [{"site": "site-1", "first_round": 2, "last_round": 3}],
}
CLUSTERS = {
    "name": "clustered_personalisation",
    "global_rounds": 1,
    "clusters": 2,
    "channels": 4,
    "layers": 1,
}
IN_CLUSTERS = {"name": "digest_synthesis", "base": "fedavg"}
COMPOSITIONS: dict[str, dict[str, Any]] = {
    "FedDig on layer attention": DIGESTS
    | {"strategy": {"name": "digest_synthesis", "base": "layer_attention"}},
    "layer attention in clusters": {"strategy": CLUSTERS | {"base": "layer_attention"}},
    "FedDig in clusters": DIGESTS | {"strategy": CLUSTERS | {"base": IN_CLUSTERS, "personal": []}},
    "FedDig in clusters, heads at the sites": DIGESTS | {"strategy": CLUSTERS | {"base": IN_CLUSTERS}},
    "SCAFFOLD in clusters, heads at the sites": {"strategy": CLUSTERS | {"base": "scaffold"}},
    "private ring with exemplars": {
        "learner": SMALL["learner"] | {"memory": {"per_class": 2}},
        "strategy": {"name": "serial_ring", "segments": 1},
        "privacy": NOISE | {"mode": "client_local"},
    },
    "PP-FCIL with DP-SGD": {
        "model": {"name": "dual_backbone", "backbone": "mlp", "hidden": [8]},
        "learner": SMALL["learner"]
        | {"distillation": {"weight": 1.0}, "memory": {"selection": "random", "share": 0.5}},
        "strategy": {"name": "multi_factor", "alpha": 0.7, "beta": 0.1},
        "privacy": NOISE | {"mode": "sample", "sample_rate": 0.2},
    },
}


def settings_of(folder: Path, runs: str = "runs", **changes: Any) -> RunSettings:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    return RunSettings(str(path), runs=str(folder / runs))


def state_of(folder: Path, runs: str = "runs") -> dict[str, Any]:
    """What the strategy keeps: facts as they are, tensors by what they hold."""
    checkpoint, _ = load_checkpoint(folder / runs / "composed" / "checkpoint")
    return {
        name: hash_tensors({name: value}) if isinstance(value, torch.Tensor) else value
        for name, value in checkpoint.strategy.items()
    }


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "runs" / "composed" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "round"]


@pytest.mark.parametrize("changes", COMPOSITIONS.values(), ids=COMPOSITIONS)
def test_a_composition_runs_and_goes_on_after_a_stop_to_the_same_bits(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    whole: dict[str, Any] = run_in_process(settings_of(tmp_path, **changes))
    kept = state_of(tmp_path)
    assert len(whole["accuracy_matrix"]) == 2
    assert all(event["participants"] and not event["skipped"] for event in rounds_of(tmp_path))
    assert (whole["epsilon"] is not None) == ("privacy" in changes)

    def stop(event: dict[str, Any]) -> None:
        # the newest checkpoint is of round 5: inside clusters, where there are some
        if event["event"] == "round" and event["round"] == 6:
            raise KeyboardInterrupt

    settings = settings_of(tmp_path, runs="stopped", **changes)
    with pytest.raises(KeyboardInterrupt):
        run_in_process(settings, listener=stop)
    resumed = run_in_process(replace(settings, resume="yes"))
    assert resumed["model_sha256"] == whole["model_sha256"]
    assert resumed.get("attention") == whole.get("attention")
    assert state_of(tmp_path, "stopped") == kept


@pytest.mark.parametrize("name", ["layer attention in clusters", "FedDig in clusters, heads at the sites"])
def test_a_run_that_is_finished_can_be_resumed_to_write_its_results_again(tmp_path: Path, name: str) -> None:
    settings = settings_of(tmp_path, **COMPOSITIONS[name])
    whole: dict[str, Any] = run_in_process(settings)
    again = run_in_process(replace(settings, resume="yes"))
    for block in ("personalisation", "personalised_accuracy", "model_sha256", "digest"):
        assert again.get(block) == whole.get(block)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "FedDig on layer attention",
        "FedDig in clusters, heads at the sites",
        "private ring with exemplars",
    ],
)
def test_a_composition_has_the_same_bits_with_workers(tmp_path: Path, name: str) -> None:
    one, two = (
        run_in_process(settings_of(tmp_path, runs=str(n), **COMPOSITIONS[name]), workers=n) for n in (1, 2)
    )
    assert one["model_sha256"] == two["model_sha256"]


def test_a_stand_in_has_its_place_among_the_attention_weights(tmp_path: Path) -> None:
    run_in_process(settings_of(tmp_path, **COMPOSITIONS["FedDig on layer attention"]))
    for event in rounds_of(tmp_path):
        for layer in event["details"]["attention"].values():
            assert layer["weights"].keys() == {"site-0", "site-1", "site-2"}


def test_a_stand_in_is_not_late_for_weights_by_recency(tmp_path: Path) -> None:
    base = {"name": "multi_factor", "alpha": 0, "beta": 1, "gamma": 0, "delta": 0}
    run_in_process(settings_of(tmp_path, **DIGESTS, strategy={"name": "digest_synthesis", "base": base}))
    for event in rounds_of(tmp_path):
        assert event["details"]["weights"] == pytest.approx(
            dict.fromkeys(("site-0", "site-1", "site-2"), 1 / 3)
        )


def test_a_base_inside_clusters_has_the_services_of_the_server(tmp_path: Path) -> None:
    # SCAFFOLD learns the size of a local step from them, without which its control variates stay 0
    run_in_process(settings_of(tmp_path, strategy=CLUSTERS | {"base": "scaffold", "personal": []}))
    checkpoint, _ = load_checkpoint(tmp_path / "runs" / "composed" / "checkpoint")
    control = [
        value for name, value in checkpoint.strategy.items() if name.startswith("aggregator-0/memory/")
    ]
    assert control and all(tensor.any() for tensor in control)


@pytest.mark.parametrize("wrapper", [CLUSTERS, {"name": "digest_synthesis"}], ids=["clusters", "FedDig"])
def test_a_reply_may_be_as_late_as_the_base_takes_it(wrapper: dict[str, Any]) -> None:
    keys = {key: value for key, value in wrapper.items() if key != "name"}
    for base, rounds in (
        ({"name": "multi_factor", "alpha": 0.7, "beta": 0.1, "gamma": 0.1, "delta": 0.1}, 2),
        ("fedavg", 0),
    ):
        assert build_strategy(wrapper["name"], keys | {"base": base}).traits.staleness == rounds


def test_a_base_that_lacks_its_layers_inside_clusters_is_refused_before_the_first_round(
    tmp_path: Path,
) -> None:
    base = {"name": "layer_attention", "head_query": "client_mean"}
    with pytest.raises(ConfigError, match="strategy.head_query: found client_mean, but no shared tensor"):
        run_in_process(settings_of(tmp_path, strategy=CLUSTERS | {"base": base}))
    assert not (tmp_path / "runs" / "composed" / "events.jsonl").exists()
    run_in_process(settings_of(tmp_path, runs="whole", strategy=CLUSTERS | {"base": base, "personal": []}))


@pytest.mark.parametrize("inner", [CLUSTERS | {"base": "fedavg"}, IN_CLUSTERS], ids=["clusters", "FedDig"])
def test_clusters_and_feddig_do_not_go_into_feddig(inner: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"base: \w+ has rounds of its own kind.*allowed: .* fedavg"):
        build_strategy("digest_synthesis", {"base": inner})


@pytest.mark.parametrize("base", ["serial_ring", CLUSTERS | {"base": "fedavg"}], ids=["ring", "clusters"])
def test_a_base_that_serves_all_sites_at_once_does_not_go_into_clusters(base: Any) -> None:
    with pytest.raises(ConfigError, match="serves all sites at once.*allowed: .* fedavg"):
        build_strategy("clustered_personalisation", {"base": base, "global_rounds": 1})


def test_the_whole_pp_fcil_learner_is_refused_under_dp_sgd_with_every_reason(tmp_path: Path) -> None:
    learner = SMALL["learner"] | {
        "classification": "balanced_softmax",
        "contrastive": {"weight": 0.1},
        "memory": {"selection": "herding", "per_class": 2},
    }
    changes: dict[str, Any] = COMPOSITIONS["PP-FCIL with DP-SGD"] | {
        "learner": learner,
        "strategy": {"name": "multi_factor", "alpha": 0.7, "beta": 0.1, "gamma": 0.1, "delta": 0.1},
    }
    with pytest.raises(PrivacyError) as refusal:
        run_in_process(settings_of(tmp_path, **changes))
    for reason in ("memory.selection herding", "balanced_softmax", "contrastive", "report in the clear"):
        assert reason in str(refusal.value)
