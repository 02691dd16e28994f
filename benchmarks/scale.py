"""What one server carries: rounds with many simulated sites that have next to nothing to learn.

`python -m benchmarks.scale` writes benchmarks/results/scale.json; `--sites N` prints one of its
runs. Each number of sites is a process of its own, whose largest memory is told. Sites have four samples,
train one step of a small network in cohorts of 16 and answer; what is left is what a round costs the server
for a site, with both ends of every message in this process: requests, checks, the gate, the exact sum,
journal, site records and checkpoint.
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.environment import machine, versions
from benchmarks.processes import measured
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.files import replace_file

RESULTS = Path(__file__).parent / "results" / "scale.json"
SITES = (100, 1000, 5000)
ROUNDS, COHORT, WIDTH, CLASSES = 4, 16, 64, 10


def write_experiment(sites: int, folder: Path) -> Path:
    """Four samples for each site, rows of WIDTH numbers, and a network of 4,810 parameters."""
    draw = np.random.default_rng(1)
    arrays: dict[str, Any] = {
        "x": draw.random((4 * sites, WIDTH), dtype=np.float32),
        "y": np.arange(4 * sites) % CLASSES,
        "x_test": draw.random((100, WIDTH), dtype=np.float32),
        "y_test": np.arange(100) % CLASSES,
    }
    np.savez(folder / "rows.npz", **arrays)
    path = folder / "scale.yaml"
    settings = {
        "name": "scale",
        "seed": 1,
        "data": {
            "source": "npz",
            "path": "rows.npz",
            "sites": sites,
            "partition": {"kind": "iid"},
            "validation_fraction": 0.0,
        },
        "tasks": {"count": 1, "rounds": ROUNDS},
        "model": {"name": "mlp", "hidden": [64]},
        "learner": {
            "preset": "none",
            "epochs": 1,
            "batch_size": 8,
            "optimizer": {"lr": 0.05},
            "classification": "ce",
        },
        "strategy": "fedavg",
        "evaluation": {"federated": False},
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def measure(sites: int) -> dict[str, Any]:
    """One run. The first round pays for what happens once, so it is told apart."""
    seconds: list[float] = []
    cpu: list[float] = []

    def listener(event: dict[str, Any]) -> None:
        if event["event"] in ("task_started", "round"):
            cpu.append(time.process_time())
        if event["event"] == "round":
            if event["dropped"] or event["refused"]:
                raise RuntimeError("a site failed: the time means nothing")
            seconds.append(event["seconds"])

    with tempfile.TemporaryDirectory(prefix="perennial-scale-") as name:
        folder = Path(name)
        path = write_experiment(sites, folder)
        run_in_process(RunSettings(str(path), runs=name, device="cpu"), 1, listener, COHORT)
        run = folder / "scale"
        rounds = statistics.median(seconds[1:])
        return {
            "sites": sites,
            "first_round_seconds": seconds[0],
            "round_seconds": rounds,
            "milliseconds_a_site": 1000 * rounds / sites,
            "processor_milliseconds_a_site": 1000 * (cpu[-1] - cpu[1]) / (sites * (ROUNDS - 1)),
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "journal_bytes_a_round": (run / "events.jsonl").stat().st_size / ROUNDS,
            "rounds": seconds,
        }


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sites", type=int, help="this number alone, in this process")
    arguments = parser.parse_args(words)
    if arguments.sites:
        print(json.dumps(measure(arguments.sites)))
        return
    found = [measured("-m", "benchmarks.scale", "--sites", str(sites)).found for sites in SITES]
    content = {"runs": found, "machine": machine(), "versions": versions()}
    replace_file(RESULTS, (json.dumps(content, indent=1) + "\n").encode(), mode=0o644)


if __name__ == "__main__":
    main(sys.argv[1:])
