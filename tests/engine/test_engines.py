"""One experiment, in-process and in Flower's simulation: the same final arrays. For the third engine, gRPC
with TLS and node keys, see test_deployment.py."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.flower_simulation import FlowerSimulation
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process

EXPERIMENT: dict[str, Any] = {
    "name": "engines",
    "data": {"source": "digits", "sites": 2, "samples_limit": 300, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "small_cnn"},
    "learner": {
        "preset": "none",
        "optimizer": {"lr": 0.05, "momentum": 0.9},
        "classification": "balanced_softmax",
        "distillation": {"weight": 1.0},
        "memory": {"per_class": 4},
    },
}

MASKED = EXPERIMENT | {"data": EXPERIMENT["data"] | {"sites": 3}, "secure": {"assumed_colluders": 1}}
MASKED_STATISTICS: dict[str, Any] = {
    **{key: MASKED[key] for key in ("name", "data", "secure")},
    "tasks": {"count": 2, "rounds": 1},
    "model": {"name": "features", "features": [{"name": "random", "width": 60}]},
    "strategy": {"name": "analytic", "head": "ridge"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "content", [EXPERIMENT, MASKED, MASKED_STATISTICS], ids=["clear", "masked", "masked statistics"]
)
def test_ray_gives_the_bits_of_the_in_process_engine(tmp_path: Path, content: dict[str, Any]) -> None:
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text(yaml.safe_dump(content))
    here = run_in_process(RunSettings(str(experiment), runs=str(tmp_path / "here")))
    summary = tmp_path / "there" / "engines" / "summary.json"
    with FlowerSimulation(tmp_path / "simulation") as simulation:
        run = simulation.run(
            content["data"]["sites"], {"experiment": str(experiment), "runs": str(tmp_path / "there")}
        )
        assert summary.exists(), run.output + simulation.log()
    there = json.loads(summary.read_text())
    assert there["engine"] == "ray"
    assert there["model_sha256"] == here["model_sha256"]
    assert there["accuracy_matrix"] == here["accuracy_matrix"]
