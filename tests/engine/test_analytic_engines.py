"""The closed form in all three engines: the same sums and the same head, whatever carries the messages.

Masked sums are compared in test_engines.py and test_secure_deployment.py.
"""

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
MAPS = [{"name": "random", "width": 40}, {"name": "patches", "filters": 6, "size": 4, "grid": 2}]
EXPERIMENT: dict[str, Any] = {
    "name": "hospitals",
    "data": {
        "source": "digits",
        "sites": 2,
        "samples_limit": 400,
        "validation_fraction": 0.2,
        "partition": {"kind": "iid"},
    },
    "tasks": {"count": 2, "rounds": 1},
    "model": {"name": "features", "features": MAPS},
    "rounds": {"wait_for": 2, "quorum": 2, "deadline": 300},
}
# counts of classes, weighted sums and the choice by validation samples: every message that there is
BALANCED = {"name": "analytic", "head": "balanced_ridge", "shrinkage": "validation"}
GAUSSIAN = {"name": "analytic", "head": "gaussian", "shrinkage": 0.1}


def same(there: dict[str, Any], here: dict[str, Any]) -> None:
    for key in ("sums_sha256", "features", "shrinkage", "samples"):
        assert there["analytic"][key] == here["analytic"][key]
    for key in ("model_sha256", "accuracy_matrix", "federated_accuracy"):
        assert there[key] == here[key]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [BALANCED, GAUSSIAN], ids=["balanced ridge", "gaussian"])
def test_ray_gives_the_sums_and_the_model_of_the_in_process_engine(
    tmp_path: Path, strategy: dict[str, Any]
) -> None:
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text(yaml.safe_dump(EXPERIMENT | {"strategy": strategy}))
    here = run_in_process(RunSettings(str(experiment), runs=str(tmp_path / "here")))
    summary = tmp_path / "there" / "hospitals" / "summary.json"
    with FlowerSimulation(tmp_path / "simulation") as simulation:
        run = simulation.run(len(SITES), {"experiment": str(experiment), "runs": str(tmp_path / "there")})
        assert summary.exists(), run.output + simulation.log()
    there = json.loads(summary.read_text())
    assert there["engine"] == "ray"
    same(there, here)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", [BALANCED, GAUSSIAN], ids=["balanced ridge", "gaussian"])
def test_deployed_sites_give_the_sums_and_the_model_of_the_in_process_engine(
    strategy: dict[str, Any],
) -> None:
    with Deployment(SITES) as deployment:
        deployment.init()
        experiment = deployment.folder / "experiment.yaml"
        experiment.write_text(yaml.safe_dump(EXPERIMENT | {"strategy": strategy}))
        here = run_in_process(RunSettings(str(experiment), runs=str(deployment.folder / "here")))
        policy = {"answers": ["train", "evaluate", "statistics"]}
        deployment.prepare(experiment, lambda site: {"data": None, "policy": policy})
        deployment.start_sites()
        deployment.submit()
        assert deployment.wait_for_run("hospitals") == "finished:completed", deployment.logs()
        there = json.loads((deployment.run_folder / "summary.json").read_text())
        assert there["engine"] == "grpc"
        same(there, here)
        kept = sorted(path.name for path in (deployment.run_folder / "statistics").glob("*.safetensors"))
        alone = strategy["head"] == "gaussian"
        assert len(kept) == (len(SITES) * EXPERIMENT["tasks"]["count"] if alone else 0)
        for name in SITES:
            lines = (deployment.folder / name / "state" / "ledger.jsonl").read_text().splitlines()
            kinds = [json.loads(line)["kind"] for line in lines]
            assert kinds.count("statistics") >= EXPERIMENT["tasks"]["count"], "every release is in the ledger"
