"""The epsilon of a run is what its sites charged in it: every kind of release, also of what was repeated."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from perennial.config import charges
from perennial.config.experiment import Experiment
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.privacy.ledger import Ledger

SMALL: dict[str, Any] = {
    "name": "small",
    "seed": 3,
    "data": {
        "source": "digits",
        "sites": 3,
        "samples_limit": 180,
        "partition": {"kind": "iid"},
        "normalise": {"mean": [0.3], "std": [0.4]},
    },
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "batch_size": 16, "optimizer": {"lr": 0.05}},
    "evaluation": {"federated": False},
}
SAMPLE = {
    "mode": "sample",
    "clip_norm": 1.0,
    "noise_multiplier": 4.0,
    "sample_rate": 0.5,
    "accountant": "rdp",
}
LOCAL = {"mode": "client_local", "clip_norm": 1.0, "noise_multiplier": 4.0, "accountant": "rdp"}
DIGESTS = {
    "model": {"name": "digest_two_branch", "backbone": "mlp", "hidden": [8]},
    "strategy": {"name": "digest_synthesis", "base": "fedavg"},
    "privacy": SAMPLE,
}
VECTORS = {
    "name": "clustered_personalisation",
    "base": "fedavg",
    "global_rounds": 1,
    "clusters": 2,
    "channels": 4,
    "layers": 1,
    "sparsity_epsilon": 8.0,
}
KINDS: dict[str, dict[str, Any]] = {
    "updates": {"privacy": LOCAL},
    "DP-SGD": {"privacy": SAMPLE},
    "digests, Gauss, labels too": DIGESTS
    | {
        "digests": {
            "per_digest": 4,
            "protection": "gauss",
            "epsilon": 8.0,
            "norm": 1.0,
            "label_epsilon": 2.0,
        }
    },
    "sparsity vectors": {"strategy": VECTORS, "privacy": SAMPLE},
}


def settings(folder: Path, **changes: Any) -> RunSettings:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    return RunSettings(str(path), runs=str(folder / "runs"))


def charged(folder: Path) -> dict[str, float]:
    sites = folder / "runs" / "small" / "sites"
    return {site.name: Ledger(site).cost(1e-5, "rdp").epsilon for site in sites.glob("site-*")}


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_the_summary_says_what_the_ledgers_say(tmp_path: Path, changes: dict[str, Any]) -> None:
    summary: dict[str, Any] = run_in_process(settings(tmp_path, **changes))
    per_site = charged(tmp_path)
    assert len(per_site) == 3
    assert summary["epsilon"]["per_site"] == pytest.approx(per_site)
    assert summary["epsilon"]["value"] == pytest.approx(max(per_site.values()))


SETTINGS: dict[str, Any] = {
    "name": "charged",
    "data": {"source": "digits", "sites": 3, "samples_limit": 150, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "mlp", "hidden": [8, 8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}},
    "privacy": {
        "mode": "client_local",
        "clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "delta": 1e-5,
    },
    "evaluation": {"federated": False},
}
CHARGES_VECTORS = {
    "strategy": {
        "name": "clustered_personalisation",
        "base": "fedavg",
        "global_rounds": 1,
        "clusters": 1,
        "channels": 4,
        "layers": 2,
        "sparsity_epsilon": 2.0,
    },
    "privacy": {**SETTINGS["privacy"], "mode": "sample", "sample_rate": 0.2},
}


@pytest.mark.parametrize(("changes", "kind"), [({}, "update"), (CHARGES_VECTORS, "sparsity")])
def test_ledger_and_record_have_the_same_entries(changes: dict[str, Any], kind: str, tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump({**SETTINGS, **changes}))
    run_in_process(RunSettings(str(path), runs=str(tmp_path), device="cpu"))
    folder = tmp_path / "charged"
    recorded = {
        json.dumps(entry, sort_keys=True)
        for line in (folder / "releases.jsonl").read_text().splitlines()
        for entry in json.loads(line)["entries"]
        if entry["kind"] == kind
    }
    assert recorded
    for site in ("site-0", "site-2"):
        ledger = Ledger(folder / "sites" / site)
        entries = [entry.to_json() for entry in ledger.read_entries() if entry.kind == kind]
        charged = {json.dumps({k: v for k, v in e.items() if k != "time"}, sort_keys=True) for e in entries}
        assert charged == recorded


def test_an_unprotected_vector_is_charged_as_such() -> None:
    experiment = Experiment.model_validate(SETTINGS)
    assert charges.price_sparsity(experiment, "r", None).entry.mechanism == "unprotected"
    assert charges.price_clear_release(experiment, "r", "metrics").entry.kind == "metrics"
