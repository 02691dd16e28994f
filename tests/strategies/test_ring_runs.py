"""Whole small runs of a ring: what it learns and values, and beside FedAvg."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError

SMALL: dict[str, Any] = {
    "name": "ring",
    "seed": 3,
    "data": {"source": "digits", "sites": 3, "samples_limit": 200, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "mlp", "hidden": [8]},
    "learner": {
        "preset": "none",
        "batch_size": 16,
        "optimizer": {"name": "adam", "lr": 0.01},
        "distillation": {"weight": 1.0},
        "memory": {"per_class": 2},
    },
    "strategy": {
        "name": "contribution",
        "base": {"name": "serial_ring", "segments": 2, "init_noise_std": 0.01},
    },
}


def write(folder: Path, **changes: Any) -> str:
    path = folder / f"{changes.get('name', 'ring')}.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    return str(path)


def test_a_ring_learns_classes_one_task_after_the_other_and_values_its_sites(tmp_path: Path) -> None:
    summary: dict[str, Any] = run_in_process(RunSettings(write(tmp_path), runs=str(tmp_path / "runs")))
    assert len(summary["accuracy_matrix"]) == 2
    assert summary["ring"]["hand_overs"] == 4 * 2 * 3
    assert set(summary["contribution"]) == {"site-0", "site-1", "site-2"}
    report = (tmp_path / "runs" / "ring" / "report.html").read_text()
    assert "Contribution value of each site" in report


def test_one_site_in_a_ring_learns_what_it_learns_alone(tmp_path: Path) -> None:
    data = SMALL["data"] | {"sites": 1}
    models = []
    ring = {"name": "serial_ring", "segments": 1, "relabel": "none"}
    for name, strategy in (("alone", "fedavg"), ("round", ring)):
        run_in_process(
            RunSettings(write(tmp_path, name=name, data=data, strategy=strategy), runs=str(tmp_path / "runs"))
        )
        models.append(load_file(tmp_path / "runs" / name / "model.safetensors"))
    for name, tensor in models[0].items():
        assert torch.allclose(tensor, models[1][name], atol=1e-6)


def test_one_segment_in_a_fixed_order_is_cyclic_weight_transfer(tmp_path: Path) -> None:
    models = []
    ring = {"name": "serial_ring", "segments": 1, "reshuffle": "never", "relabel": "none"}
    for name, strategy in (("cycle", "cyclic_weight_transfer"), ("ring", ring)):
        experiment = write(tmp_path, name=name, strategy=strategy)
        run_in_process(RunSettings(experiment, runs=str(tmp_path / "runs")))
        models.append(load_file(tmp_path / "runs" / name / "model.safetensors"))
    for name, tensor in models[0].items():
        assert torch.allclose(tensor, models[1][name], atol=1e-5)


def test_an_adversary_that_is_no_site_is_refused(tmp_path: Path) -> None:
    experiment = write(tmp_path, adversaries=[{"site": "site-3", "kind": "free_rider"}])
    with pytest.raises(ConfigError, match=r"adversaries: found site 'site-3'"):
        RunSettings(experiment).load()


def test_a_free_rider_is_named_and_a_label_flipper_has_the_least_value(tmp_path: Path) -> None:
    experiment = write(
        tmp_path,
        data={"source": "digits", "sites": 4, "samples_limit": 600, "partition": {"kind": "iid"}},
        tasks={"count": 1, "rounds": 6},
        model={"name": "mlp", "hidden": [16]},
        learner={"preset": "none", "batch_size": 16, "optimizer": {"name": "adam", "lr": 0.01}},
        strategy={"name": "contribution", "utility": "probability", "base": SMALL["strategy"]["base"]},
        adversaries=[{"site": "site-1", "kind": "free_rider"}, {"site": "site-2", "kind": "label_flip"}],
    )
    summary: dict[str, Any] = run_in_process(RunSettings(experiment, runs=str(tmp_path / "runs")))
    values = {site: entry["value"] for site, entry in summary["contribution"].items()}
    assert values["site-1"] == 0.0
    assert min(values, key=values.__getitem__) == "site-2"
    assert summary["contribution"]["site-1"]["flag"] == "null update"
    assert summary["contribution"]["site-2"]["flag"] is None, "in a ring a value accuses nobody"
