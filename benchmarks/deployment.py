"""What a model of 500 MB costs on the wire. For rounds of nearly no work see deployment_scale.py.

Real processes on loopback, TLS and node keys on.

    python -m benchmarks.deployment

writes benchmarks/results/deployment.jsonl
"""

import json
import time
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from benchmarks.environment import machine, versions
from benchmarks.loopback import Deployment
from benchmarks.table import RESULTS_REVISION
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process

ROOT = Path(__file__).resolve().parents[1]

RESULTS = ROOT / "benchmarks" / "results" / "deployment.jsonl"


def experiment(name: str, model: dict[str, Any], sites: int, rounds: int) -> dict[str, Any]:
    """Digits shared out to sites that train for a moment only, so that what remains is the deployment's."""
    return {
        "name": name,
        "data": {
            "source": "digits",
            "sites": sites,
            "samples_limit": 60 * sites,
            "partition": {"kind": "iid"},
        },
        "tasks": {"count": 1, "rounds": rounds},
        "model": model,
        "rounds": {"wait_for": sites, "quorum": sites, "deadline": 560},
        "learner": {"preset": "none", "optimizer": {"lr": 0.01}},
        "evaluation": {"federated": False},
    }


def deployed(content: dict[str, Any], sites: list[str]) -> tuple[list[float], dict[str, Any], str]:
    """Seconds of each round, summary, and the in-process engine's model_sha256 for the same experiment."""
    with Deployment(sites) as deployment:
        deployment.init()
        path = deployment.folder / "experiment.yaml"
        path.write_text(yaml.safe_dump(content))
        deployment.prepare(path, lambda site: {"data": None})
        deployment.start_sites()
        deployment.deploy("submit", path)
        status = deployment.wait_for_run(content["name"], 1500)
        folder = deployment.operator / "state" / "runs" / content["name"]
        if status != "finished:completed":
            raise SystemExit(f"{status}\n{deployment.logs()}")
        events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
        seconds = [event["seconds"] for event in events if event["event"] == "round"]
        # sites without data of their own share the experiment's, which the seed's key divides at every engine
        here = run_in_process(RunSettings(str(path), runs=str(deployment.folder / "here")))
        return seconds, json.loads((folder / "summary.json").read_text()), str(here["model_sha256"])


def large_model() -> dict[str, Any]:
    """One site trains a model of 500 MB for two rounds."""
    hidden = 11_100
    model = {"name": "mlp", "hidden": [hidden, hidden]}
    start = time.monotonic()
    seconds, summary, expected = deployed(experiment("large", model, 1, 2), ["site-0"])
    return {
        "name": "deployment_large_model",
        "value": round(mean(seconds), 1),
        "samples": [round(value, 1) for value in seconds],
        "bytes_down": summary["bytes_down"],
        "bytes_up": summary["bytes_up"],
        "whole_run_seconds": round(time.monotonic() - start),
        "same_model_as_in_process": summary["model_sha256"] == expected,
    }


def main() -> None:
    """Measure, and replace the results file."""
    measured_on = {"revision": RESULTS_REVISION, "versions": versions(), "machine": machine()}
    line = json.dumps({**large_model(), **measured_on})
    RESULTS.write_text(f"{line}\n")
    print(line, flush=True)


if __name__ == "__main__":
    main()
