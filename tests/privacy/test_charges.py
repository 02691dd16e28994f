"""A release is charged by one function, at the site and in the server's record: both have the same entry."""

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
        "noise_source": "seeded",
    },
    "evaluation": {"federated": False},
}
VECTORS = {
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
MEANS = {
    "learner": {
        "preset": "none",
        "optimizer": {"lr": 0.05},
        "memory": {"per_class": 2},
        "classifier": "nearest_mean",
        "means": "global",
    }
}


@pytest.mark.parametrize(("changes", "kind"), [({}, "update"), (VECTORS, "sparsity"), (MEANS, "class_means")])
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
        entries = [entry.to_json() for entry in ledger.entries() if entry.kind == kind]
        charged = {json.dumps({k: v for k, v in e.items() if k != "time"}, sort_keys=True) for e in entries}
        assert charged == recorded
        assert all(json.loads(entry).get("seeded") for entry in charged)


def test_an_unprotected_vector_is_charged_as_such() -> None:
    experiment = Experiment.model_validate(SETTINGS)
    assert charges.sparsity(experiment, "r", None, None).mechanism == "unprotected"
    assert charges.in_the_clear(experiment, "r", "metrics").kind == "metrics"
