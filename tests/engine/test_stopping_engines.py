"""Early stopping on Ray and over gRPC: the bits of the in-process engine."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.flower_simulation import FlowerSimulation
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from tests.loopback import Deployment

SITES = ["site-0", "site-1"]
EXPERIMENT: dict[str, Any] = {
    "name": "hospitals",
    "data": {"source": "digits", "sites": 2, "samples_limit": 200, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 4},
    "model": {"name": "mlp", "hidden": [16]},
    "learner": {
        "preset": "none",
        "optimizer": {"lr": 0.05},
        "memory": {"selection": "random", "per_class": 2},
    },
    # no round after the first one is so much better, so that each task ends after its second round
    "stopping": {"patience": 1, "gain": 0.9},
}


DEPLOYED = {"rounds": {"wait_for": 2, "quorum": 2, "deadline": 120}}


def written(folder: Path, **more: Any) -> tuple[Path, dict[str, Any]]:
    """The experiment's file, and the summary of its run in process."""
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT | more))
    here = run_in_process(RunSettings(str(path), runs=str(folder / "here")))
    assert here["rounds"] == 4, "two of four rounds in each task"
    return path, here


def compare(run: Path, here: dict[str, Any], engine: str) -> None:
    there = json.loads((run / "summary.json").read_text())
    assert there["engine"] == engine and there["rounds"] == here["rounds"]
    assert there["model_sha256"] == here["model_sha256"]


@pytest.mark.slow
def test_ray_stops_where_the_in_process_engine_stops(tmp_path: Path) -> None:
    experiment, here = written(tmp_path)
    config = {"experiment": str(experiment), "runs": str(tmp_path / "there")}
    with FlowerSimulation(tmp_path / "simulation") as simulation:
        output = simulation.run(len(SITES), config).output + simulation.log()
    folder = tmp_path / "there" / "hospitals"
    assert (folder / "summary.json").exists(), output
    compare(folder, here, "ray")


@pytest.mark.slow
def test_deployed_sites_stop_where_the_in_process_engine_stops() -> None:
    with Deployment(SITES) as deployment:
        deployment.init()
        experiment, here = written(deployment.folder, **DEPLOYED)
        deployment.prepare(experiment, lambda site: {"data": None})
        deployment.start_sites()
        deployment.deploy("submit", experiment)
        assert deployment.wait_for_run("hospitals") == "finished:completed", deployment.logs()
        compare(deployment.run_folder, here, "grpc")
