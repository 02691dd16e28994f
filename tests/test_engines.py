"""One experiment, in-process, in Flower's simulation, and over gRPC with TLS and node keys: the same final
arrays."""

import json
from pathlib import Path

import pytest
import yaml

from benchmarks.flower_simulation import FlowerSimulation
from benchmarks.loopback import Deployment
from config.run import RunSettings
from engine.run import run_in_process

EXPERIMENT = {
    "name": "engines",
    "data": {"source": "digits", "sites": 2, "samples_limit": 300, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "small_cnn"},
    "learner": {
        "optimizer": {"lr": 0.05, "momentum": 0.9},
        "classification": "balanced_softmax",
        "distillation": {"weight": 1.0},
        "memory": {"per_class": 4},
    },
}


@pytest.mark.slow
def test_ray_gives_the_bits_of_the_in_process_engine(tmp_path: Path) -> None:
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text(yaml.safe_dump(EXPERIMENT))
    here = run_in_process(RunSettings(str(experiment), runs=str(tmp_path / "here")))
    summary = tmp_path / "there" / "engines" / "summary.json"
    with FlowerSimulation(tmp_path / "simulation") as simulation:
        run = simulation.run(2, {"experiment": str(experiment), "runs": str(tmp_path / "there")})
        assert summary.exists(), run.output + simulation.log()
    there = json.loads(summary.read_text())
    assert there["engine"] == "ray"
    assert there["model_sha256"] == here["model_sha256"]
    assert there["accuracy_matrix"] == here["accuracy_matrix"]


@pytest.mark.slow
def test_a_deployment_gives_the_bits_of_the_in_process_engine(tmp_path: Path) -> None:
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text(yaml.safe_dump(EXPERIMENT))
    here = run_in_process(RunSettings(str(experiment), runs=str(tmp_path / "here")))
    sites = {}
    for name in ("site-0", "site-1"):
        sites[name] = tmp_path / f"{name}.yaml"
        sites[name].write_text(yaml.safe_dump({"site": name, "state_dir": str(tmp_path / f"state-{name}")}))
    folder = tmp_path / "deployment"
    with Deployment(folder, sites) as deployment:
        run_config = f'experiment="{experiment}" runs="{tmp_path / "there"}"'
        output = deployment.flwr("run", ".", "here", "--stream", "--run-config", run_config)
        summary = tmp_path / "there" / "engines" / "summary.json"
        assert summary.exists(), output + deployment.logs()
    there = json.loads(summary.read_text())
    assert there["engine"] == "grpc"
    assert there["model_sha256"] == here["model_sha256"]
    for name in sites:
        ledger = (tmp_path / f"state-{name}" / "ledger.jsonl").read_text().splitlines()
        assert len(ledger) == summary_rounds(there), "every release of a real site is in its ledger"


def summary_rounds(summary: dict) -> int:
    """Rounds in which each site released an update."""
    return summary["rounds"]
