"""What a round of nearly no work costs with many sites: seconds, processor time and memory.

Real processes on loopback, TLS and node keys on, all on this machine, with one or more numbers of sites:

    python -m benchmarks.deployment_scale [SITES...]

writes benchmarks/results/deployment_scale.jsonl
"""

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.deployment import experiment
from benchmarks.environment import machine, versions
from benchmarks.loopback import QuickDeployment
from benchmarks.processes import family
from benchmarks.table import RESULTS_REVISION
from perennial.config.experiment import Experiment
from perennial.config.simulation import simulated_site_names

RESULTS = Path(__file__).resolve().parent / "results" / "deployment_scale.jsonl"
SITES = (2, 5, 10, 20)
ROUNDS = 8
GOAL = 5.0
"""Seconds of a round with 20 sites."""


def measure(count: int) -> dict[str, Any]:
    """One run with this many sites. Memory is shared fairly among processes that share a page (PSS)."""
    content = experiment("scale", {"name": "mlp"}, count, ROUNDS)
    names = list(simulated_site_names(Experiment.model_validate(content)))
    with QuickDeployment(names) as deployment:
        deployment.init()
        path = deployment.folder / "experiment.yaml"
        path.write_text(yaml.safe_dump(content))
        deployment.prepare(path, lambda site: {"data": None})
        deployment.start_sites()
        deployment.deploy("submit", path)
        folder = deployment.operator / "state" / "runs" / "scale"
        seconds: list[float] = []
        used: list[dict[str, float]] = []
        sites = [deployment.process_id(name) for name in names]
        roles = {"site": sites, "superlink": [deployment.process_id("superlink")]}
        memory: dict[str, float] = {}
        until = time.monotonic() + 1500
        while len(seconds) < ROUNDS:
            if time.monotonic() > until:
                raise SystemExit(f"{count} sites: no end in 1500 s\n{deployment.logs()}")
            time.sleep(0.1)
            lines = (
                (folder / "events.jsonl").read_text().splitlines()
                if (folder / "events.jsonl").is_file()
                else []
            )
            rounds = [event for event in map(json.loads, lines) if event["event"] == "round"]
            if len(rounds) > len(seconds):
                if missing := count - len(rounds[-1]["participants"]):
                    raise SystemExit(f"{missing} sites did not take part: {rounds[-1]}\n{deployment.logs()}")
                seconds = [event["seconds"] for event in rounds]
                used.append(
                    {
                        role: sum(sum(family(process).values()) for process in processes)
                        for role, processes in roles.items()
                    }
                )
            if len(seconds) == ROUNDS // 2 and not memory:
                memory = {
                    "site_megabytes": median(_megabytes(deployment.process_id(name)) for name in names),
                    "superlink_megabytes": _megabytes(deployment.process_id("superlink")),
                }
        deployment.wait_for_run("scale", 240)
    later = seconds[1:]
    return {
        "sites": count,
        "round_seconds": round(median(later), 2),
        "first_round_seconds": round(seconds[0], 2),
        "samples": [round(value, 2) for value in later],
        "processor_seconds_per_round": {
            "site": round((used[-1]["site"] - used[0]["site"]) / (len(used) - 1) / count, 2),
            "superlink": round((used[-1]["superlink"] - used[0]["superlink"]) / (len(used) - 1), 2),
        },
        **{name: round(value) for name, value in memory.items()},
    }


def _megabytes(root: int) -> float:
    """Memory of a process and all below it."""
    total = 0
    for process in family(root):
        try:
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total / 1024


def main() -> None:
    """Measure each number of sites and replace its line in the results file."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    found = {entry["sites"]: entry for entry in map(json.loads, lines)}
    for count in [int(word) for word in sys.argv[1:]] or SITES:
        measured_on = {"versions": versions(), "machine": machine(), "revision": RESULTS_REVISION}
        found[count] = {**measure(count), **measured_on}
        print(json.dumps(found[count]), flush=True)
        RESULTS.write_text("".join(json.dumps(found[key]) + "\n" for key in sorted(found)))


if __name__ == "__main__":
    main()
