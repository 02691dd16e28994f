"""How the default bounds change honest runs: `python -m perennial.benchmarks.honest_bounds`.

Makes the short runs of recorded_runs.yaml, which cover every strategy and the committed experiments on a
processor, with bounds and without, and writes results/honest_bounds.jsonl: how many updates were scaled down
or dropped, how many claims capped, and the final accuracy of both. Runs that are there already are kept.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

from perennial.benchmarks.recorded_hashes import RUNS
from perennial.config.run import APP_ROOT, RunSettings
from perennial.engine.run import run_in_process

RESULT = Path(__file__).with_name("results") / "honest_bounds.jsonl"
OFF = "bounds={norm_multiple: null, samples_multiple: null}"


def outcome(run: dict[str, Any], *more: str) -> dict[str, Any]:
    """Accuracy and bits of one short run, and what its journal says of bounds."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(APP_ROOT / "experiments" / f"{run['of']}.yaml")
        settings = RunSettings(path, json.dumps([*run["set"], *more]), runs=folder, device="cpu")
        summary = run_in_process(settings)
        journal = next(Path(folder).glob("*/events.jsonl")).read_text()
    events = [json.loads(line) for line in journal.splitlines()]
    rounds = [event for event in events if event["event"] == "round"]
    return {
        "final_accuracy": summary["final_accuracy"],
        "model_sha256": summary["model_sha256"],
        "replies": sum(len(event["participants"]) for event in rounds),
        "skipped": sum(event["skipped"] for event in rounds),
        "scaled": journal.count("scaled down"),
        "capped": journal.count("samples, and counts as"),
        "dropped": sum(len(event["dropped"]) for event in rounds),
    }


def main() -> None:
    torch.set_num_threads(1)
    lines = RESULT.read_text().splitlines() if RESULT.exists() else []
    done = {json.loads(line)["run"] for line in lines}
    for name, run in yaml.safe_load(RUNS.read_text()).items():
        if name in done:
            continue
        line = {"run": name, "bounds": outcome(run), "none": outcome(run, OFF)}
        with RESULT.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(name, line["bounds"], line["none"]["final_accuracy"], flush=True)


if __name__ == "__main__":
    main()
