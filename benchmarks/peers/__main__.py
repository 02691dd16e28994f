"""Simulators side by side: `python -m benchmarks.peers`.

Writes benchmarks/results/peers.jsonl, one object for each workload and peer, and peers.md. Environments are
made when they are first needed and before anything is timed. The runs of a workload follow one another in
turns (A B, B A, A B ...); another number of local steps is an error.
"""

import json
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.environment import machine, versions
from benchmarks.peers.contestants import CONTESTANTS, Contestant
from benchmarks.peers.environments import FOLDER
from benchmarks.peers.page import MARKDOWN, RESULTS, as_markdown, read
from benchmarks.peers.prepare import write_task
from benchmarks.processes import Ended
from benchmarks.table import RESULTS_REVISION
from benchmarks.workloads import write_workload
from perennial.config.experiment import load_experiment
from perennial.foundation.files import replace_file

ALIKE = 0.01
"""Share by which numbers of local steps may differ."""


def side_by_side(
    workload: str, contestants: dict[str, Contestant], times: int, rounds: int | None
) -> dict[str, list[Ended]]:
    """Runs by contestant, in turns; a slow one takes part in the first turn alone.

    Raises RuntimeError where two did different numbers of local steps.
    """
    ended: dict[str, list[Ended]] = {name: [] for name in contestants}
    changes = [] if rounds is None else [f"tasks.rounds={rounds}"]
    with tempfile.TemporaryDirectory(prefix="perennial-peers-") as name:
        folder = Path(name)
        write_task(load_experiment(write_workload(workload, folder), changes), folder)
        for turn in range(times):
            names = list(contestants) if turn % 2 == 0 else list(reversed(contestants))
            for peer in names:
                if turn and contestants[peer].slow:
                    continue
                run = contestants[peer].run(workload, folder, ";".join(changes))
                ended[peer].append(run)
                print(f"{workload}: {peer}: {run.seconds:.1f} s, {run.found}", flush=True)
    check_steps(workload, {peer: [run.found["steps"] for run in runs] for peer, runs in ended.items()})
    return ended


def check_steps(workload: str, steps: dict[str, list[int]]) -> None:
    """Raises RuntimeError unless all are nearly one number above 0.

    They may differ by ALIKE: which sites a round takes is each simulator's own, and sites differ in size.
    """
    found = {number for numbers in steps.values() for number in numbers}
    if 0 in found or max(found) > (1 + ALIKE) * min(found):
        raise RuntimeError(f"{workload}: different numbers of local steps: {steps}")


def entry(workload: str, name: str, contestant: Contestant, runs: list[Ended], load: float) -> dict[str, Any]:
    """One line of the result file; each value is a median, and every sample stands beside it."""
    samples = {
        "whole_seconds": [round(run.seconds, 3) for run in runs],
        "rounds_seconds": [round(run.found["seconds"], 3) for run in runs],
        "peak_mib": [round(run.peak_kib / 1024, 1) for run in runs],
        "accuracy": [round(run.found["accuracy"], 4) for run in runs],
    }
    return {
        "workload": workload,
        "peer": name,
        "simulator": contestant.simulator,
        **{key: round(median(values), 4) for key, values in samples.items()},
        "steps": runs[0].found["steps"],
        "samples": samples,
        "revision": RESULTS_REVISION,
        "versions": runs[0].found.get("versions") or versions(),
        "machine": machine(),
        "load_before": round(load, 2),
    }


def main(
    names: Annotated[list[str] | None, typer.Argument(help="of peers; all without")] = None,
    workloads: Annotated[str, typer.Option(help="separated by commas")] = "w1,w2,w3",
    times: Annotated[int, typer.Option(help="turns")] = 3,
    rounds: Annotated[int | None, typer.Option(help="fewer rounds, to try it out; nothing is kept")] = None,
    environments: Annotated[Path, typer.Option(help="where the peers' environments are made")] = FOLDER,
) -> None:
    """Time the peers and write the table."""
    unknown = sorted(set(names or ()) - CONTESTANTS.keys())
    if unknown:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; peers: {', '.join(CONTESTANTS)}")
    chosen = {name: CONTESTANTS[name] for name in names or CONTESTANTS}
    for contestant in chosen.values():
        contestant.prepare(environments)
    for workload in workloads.split(","):
        load = os.getloadavg()[0]
        found = side_by_side(workload, chosen, times, rounds)
        if rounds is None:
            store([entry(workload, name, chosen[name], runs, load) for name, runs in found.items()])


def store(entries: list[dict[str, Any]]) -> None:
    """Put entries in the place of those of the same workload and peer, and write the page."""
    kept = {(old["workload"], old["peer"]): old for old in read()}
    kept |= {(new["workload"], new["peer"]): new for new in entries}
    order = sorted(kept.values(), key=lambda each: each["workload"])
    replace_file(RESULTS, "".join(json.dumps(each) + "\n" for each in order).encode(), mode=0o644)
    replace_file(MARKDOWN, as_markdown(order).encode(), mode=0o644)


if __name__ == "__main__":
    typer.run(main)
