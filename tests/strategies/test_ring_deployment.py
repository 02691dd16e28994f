"""A ring of real sites on loopback, TLS and node keys on."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from tests.loopback import Deployment

SITES = ["site-0", "site-1"]
HOPS = 4
"""In a round."""
ROUNDS = 2
EXPERIMENT: dict[str, Any] = {
    "name": "hospitals",
    "data": {"source": "digits", "sites": 2, "samples_limit": 120, "partition": {"kind": "iid"}},
    "tasks": {"count": 1, "rounds": ROUNDS},
    "model": {"name": "mlp", "hidden": [16]},
    "rounds": {"wait_for": 2, "quorum": 2, "deadline": 120},
    "learner": {"preset": "none", "optimizer": {"name": "adam", "lr": 0.01}},
    "evaluation": {"federated": False},
    "strategy": {
        "name": "contribution",
        "utility": "probability",
        "base": {"name": "serial_ring", "segments": HOPS // len(SITES), "init_noise_std": 0.01},
    },
}


def journal(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_deployed_ring_comes_to_the_simulated_bits() -> None:
    with Deployment(SITES) as deployment:
        deployment.init()
        experiment = deployment.folder / "experiment.yaml"
        experiment.write_text(yaml.safe_dump(EXPERIMENT))
        here = run_in_process(RunSettings(str(experiment), runs=str(deployment.folder / "here")))
        deployment.prepare(experiment, lambda site: {"data": None})
        deployment.start_sites()
        deployment.submit()
        assert deployment.wait_for_run("hospitals") == "finished:completed", deployment.logs()

        there = json.loads((deployment.run_folder / "summary.json").read_text())
        assert there["engine"] == "grpc"
        assert there["model_sha256"] == here["model_sha256"]
        assert there["contribution"] == here["contribution"]
        assert there["ring"] == here["ring"]
        rounds = [
            [event["details"]["turns"] for event in journal(run) if event["event"] == "round"]
            for run in (deployment.run_folder, deployment.folder / "here" / "hospitals")
        ]
        assert rounds[0] == rounds[1]
        released = {
            name: [
                line["time"]
                for line in map(json.loads, (deployment.folder / name / "state" / "ledger.jsonl").open())
                if line["kind"] == "update"
            ]
            for name in SITES
        }
        assert sum(map(len, released.values())) == ROUNDS * HOPS, f"{released}{deployment.logs()}"
