"""How the default bounds change honest runs: `python -m benchmarks.honest_bounds`.

Makes the short runs of recorded_runs.yaml, which cover every strategy, and two rounds a task of each other
committed experiment, and counts in their journals which updates were scaled down or dropped and
which claims were capped. A run that met a bound is made again without any. Writes
results/honest_bounds.jsonl, a line a run, and honest_bounds.md; runs that are there already are kept.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.recorded_hashes import RUNS
from perennial.config.run import APP_ROOT, RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.files import replace_file

RESULT = Path(__file__).with_name("results") / "honest_bounds.jsonl"
PAGE = RESULT.with_suffix(".md")
OFF = "bounds={norm_multiple: null, share: 1}"
TOO_LARGE = tuple(
    f"{paper}_as_published" for paper in ("feddig", "fedperc", "incre_fl", "pp_fcil", "tricon_sf")
)
"""For a GPU, and two of them download; smaller experiments have the same methods."""
NO_DATA = ("own_data",)
"""Needs a hospital's folder."""
SHORTENED = {"analytic": [], "fedperc": ["tasks.rounds=3", "strategy.global_rounds=2"]}
"""By the first word of an experiment, if not to two rounds a task."""
MET = ("scaled", "capped", "dropped", "skipped")


def planned() -> dict[str, dict[str, Any]]:
    """name -> {of: experiment, set: overrides}, in the order in which they are made."""
    runs: dict[str, dict[str, Any]] = yaml.safe_load(RUNS.read_text())
    covered = {run["of"] for run in runs.values()} | {*TOO_LARGE, *NO_DATA}
    for path in sorted((APP_ROOT / "experiments").glob("*.yaml")):
        if path.stem not in covered:
            changes = SHORTENED.get(path.stem.split("_")[0], ["tasks.rounds=2"])
            runs[path.stem] = {"of": path.stem, "set": changes}
    return runs


def outcome(run: dict[str, Any], *more: str) -> dict[str, Any]:
    """Accuracy and bits of one short run, and what its journal says of bounds."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(APP_ROOT / "experiments" / f"{run['of']}.yaml")
        settings = RunSettings(path, json.dumps([*run["set"], *more]), runs=folder, device="cpu")
        summary = run_in_process(settings)
        journal = next(Path(folder).glob("*/events.jsonl")).read_text()
    events = [json.loads(line) for line in journal.splitlines()]
    rounds = [event for event in events if event["event"] == "round"]
    dropped = [entry["reason"] for event in rounds for entry in event["dropped"]]
    return {
        "final_accuracy": summary["final_accuracy"],
        "model_sha256": summary["model_sha256"],
        "rounds": len(rounds),
        "replies": sum(len(event["participants"]) for event in rounds),
        "skipped": sum(event["skipped"] for event in rounds),
        "scaled": journal.count("scaled down"),
        "capped": journal.count("samples, and counts as"),
        "dropped": len(dropped),
    }


def page(lines: Sequence[dict[str, Any]]) -> str:
    """The committed page of all runs that there are."""
    met = [line for line in lines if line["none"] is not None]
    replies = sum(line["bounds"]["replies"] for line in lines)
    rows = [
        f"| {line['run']} | {' | '.join(str(line['bounds'][kind]) for kind in MET)} | "
        f"{line['bounds']['replies']} | {100 * line['bounds']['final_accuracy']:.1f} | "
        f"{100 * line['none']['final_accuracy']:.1f} |"
        for line in met
    ]
    return "\n".join(
        [
            "# The default bounds in honest runs",
            "",
            f"`python -m benchmarks.honest_bounds`, {len(lines)} of {len(planned())} short "
            f"runs, which cover every strategy and every committed experiment but {', '.join(TOO_LARGE)}, "
            f"which are for a GPU, and {', '.join(NO_DATA)}, which has no data of its own.",
            "",
            f"No run was stopped. Of {replies} replies "
            f"{sum(line['bounds']['scaled'] for line in lines)} were scaled down, "
            f"and {sum(line['bounds']['capped'] for line in lines)} had their claim of samples capped. "
            f"{len(lines) - len(met)} runs met no bound. The others, with bounds and without, final accuracy "
            "in per cent:",
            "",
            f"| run | {' | '.join(MET)} | replies | with bounds | without |",
            f"| --- |{' --- |' * (len(MET) + 3)}",
            *rows,
            "",
        ]
    )


def main() -> None:
    torch.set_num_threads(1)
    lines = [json.loads(line) for line in RESULT.read_text().splitlines()] if RESULT.exists() else []
    done = {line["run"] for line in lines}
    for name, run in planned().items():
        if name in done:
            continue
        bounded = outcome(run)
        met = any(bounded[kind] for kind in MET)
        lines.append({"run": name, "bounds": bounded, "none": outcome(run, OFF) if met else None})
        replace_file(RESULT, "".join(json.dumps(line) + "\n" for line in lines).encode())
        print(name, bounded, flush=True)
    replace_file(PAGE, page(lines).encode())


if __name__ == "__main__":
    main()
