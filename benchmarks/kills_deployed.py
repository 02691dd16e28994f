"""Kill the server's process of deployed runs at moments that a seed draws, resume them, and compare.

Real processes on loopback, TLS and node keys on; several runs go at once over the same two hospitals. A run
is killed (SIGKILL) some time after a line of its journal, and goes on by `perennial deploy resume`.

    python -m benchmarks.kills_deployed [--minutes M] [--together N]

adds to benchmarks/results/kills_deployed.json; kills.py puts it on its page.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.environment import machine, versions
from benchmarks.kills import DEPLOYED, forked, write_page
from benchmarks.loopback import QuickDeployment, digit_folders
from benchmarks.split_keys import split_key_of
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.files import replace_file
from perennial.privacy.ledger import Ledger
from perennial.server.checkpoint import load_checkpoint
from perennial.server.run_folder import CHECKPOINT
from perennial.server.summary import hashes_of

SITES = ["graz", "linz"]
LINES = 14
"""A run writes more lines into its journal; a kill comes after one of so many."""
DELAY = 1.5
"""Seconds at most between the line and the kill."""
EXPERIMENT: dict[str, Any] = {
    "name": "killed",
    "data": {
        "source": "folder",
        "classes": [f"digit-{digit}" for digit in range(10)],
        "image_size": 8,
        "color": "gray",
        "normalise": {"mean": 0.3, "std": 0.35},
    },
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "mlp", "hidden": [8]},
    "rounds": {"wait_for": 2, "quorum": 2, "join_timeout": 240, "deadline": 240},
    "learner": {
        "preset": "none",
        "optimizer": {"lr": 0.05},
        "memory": {"selection": "random", "per_class": 4},
    },
}


class Federation(QuickDeployment):
    """Two hospitals that have approved EXPERIMENT under every name."""

    def ready(self) -> Path:
        """Start everything; the experiment's file."""
        self.init()
        digit_folders(self.folder / "data", SITES, 100)
        path = self.folder / "experiment.yaml"
        path.write_text(yaml.safe_dump(EXPERIMENT))
        policy = {"max_runs": 1000}
        self.prepare(
            path, lambda site: {"data": {"path": str(self.folder / "data" / site)}, "policy": policy}
        )
        self.start_sites()
        return path

    def run_folder(self, name: str) -> Path:
        return self.operator / "state" / "runs" / name

    def lines(self, name: str) -> list[str]:
        """The journal so far."""
        path = self.run_folder(name) / "events.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    def server(self, name: str) -> int:
        """The process of a run's ServerApp, which holds the lock of its folder; 0 if it has none."""
        lock = self.run_folder(name) / "lock"
        said = lock.read_text().split() if lock.exists() else []
        number = int(said[-1]) if said and said[-1].isdigit() else 0
        place = Path(f"/proc/{number}/cmdline")
        return number if number and place.exists() and b"serverapp" in place.read_bytes() else 0

    def charges(self, name: str) -> dict[str, int]:
        """Of each site's ledger, the lines of one run."""
        run = load_checkpoint(self.run_folder(name) / CHECKPOINT)[0].progress.run
        return {
            site: sum(entry.run == run for entry in Ledger(self.folder / site / "state").entries())
            for site in SITES
        }


def kill(federation: Federation, name: str, lines: int, delay: float) -> str:
    """End a run's server at its moment; the journal's last event then, '' if the run was over before."""
    until = time.monotonic() + 300
    while len(federation.lines(name)) < lines:
        if (federation.run_folder(name) / "summary.json").exists() or time.monotonic() > until:
            return ""
        time.sleep(0.02)
    time.sleep(delay)
    process = federation.server(name)
    if not process or (federation.run_folder(name) / "summary.json").exists():
        return ""
    os.kill(process, signal.SIGKILL)
    return json.loads(federation.lines(name)[-1])["event"]


def ended(federation: Federation, name: str) -> bool:
    """Whether a run was completed; one that was not goes on."""
    for _ in range(3):
        if federation.wait_for_run(name, 600) == "finished:completed":
            return True
        federation.deploy("resume", name)
    return federation.wait_for_run(name, 600) == "finished:completed"


def differs(federation: Federation, path: Path, name: str, whole: dict[str, int]) -> list[str]:
    """In what a run is not as one that nothing disturbed. whole: charges of such a run, by site."""
    there = json.loads((federation.run_folder(name) / "summary.json").read_text())
    data = {**EXPERIMENT["data"], "path": str(federation.folder / "data"), "partition": {"kind": "natural"}}
    simulated = path.with_name("simulated.yaml")
    simulated.write_text(yaml.safe_dump({**EXPERIMENT, "data": data}))
    settings = RunSettings(str(simulated), name=name, runs=str(federation.folder / "here"))

    def reference(note: Path) -> None:
        with split_key_of(federation.run_folder(name)):
            note.write_text(json.dumps(run_in_process(settings)))

    # in a fork: a process remembers how data were divided, and each run has a key of its own
    note = federation.folder / f"{name}.json"
    if forked(reference, note):
        raise RuntimeError(note.with_suffix(".log").read_text()[-1500:])
    here: dict[str, Any] = json.loads(note.read_text())
    found = {
        "model": hashes_of(there) == hashes_of(here),
        "tasks": there["tasks"] == here["tasks"],
        "rounds": there["rounds"] == here["rounds"],
        "accuracy": there["accuracy_matrix"] == here["accuracy_matrix"],
        "charges": federation.charges(name) == whole,
    }
    return [what for what, same in found.items() if not same]


def batch(
    federation: Federation, path: Path, names: Sequence[str], draw: random.Random
) -> list[dict[str, Any]]:
    """Runs that go at once, each killed at its moment."""
    moments = {name: (draw.randrange(1, LINES + 1), draw.uniform(0, DELAY)) for name in names}
    for name in names:
        federation.deploy("submit", path, "--name", name)
    # in the order of their moments
    after = {name: kill(federation, name, *moments[name]) for name in sorted(names, key=moments.__getitem__)}
    ends = {name: ended(federation, name) for name in names}
    return [
        {
            "at": round(moments[name][0] + moments[name][1] / 10, 3),
            "after": after[name],
            "completed": ends[name],
            "name": name,
        }
        for name in names
    ]


def main(arguments: list[str]) -> None:
    """Kill for so many minutes; what was done is in the results after every batch."""
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    until = time.monotonic() + 60 * float(options.get("--minutes", 15))
    together = int(options.get("--together", 3))
    done: dict[str, Any] = json.loads(DEPLOYED.read_text()) if DEPLOYED.exists() else {}
    kills: list[dict[str, Any]] = done.get("kills", [])
    with Federation(SITES) as federation:
        path = federation.ready()
        federation.deploy("submit", path, "--name", "whole")
        if federation.wait_for_run("whole", 600) != "finished:completed":
            raise SystemExit(federation.logs())
        whole = federation.charges("whole")
        if wrong := differs(federation, path, "whole", whole):
            raise SystemExit(f"a run that nothing disturbed differs in {wrong}")
        begun = 0
        while time.monotonic() < until:
            names = [f"k{begun + number}" for number in range(together)]
            begun += together
            for found in batch(federation, path, names, random.Random(f"1 {len(kills)} {begun}")):
                name = found.pop("name")
                wrong = differs(federation, path, name, whole) if found["completed"] else ["not completed"]
                if found["after"]:
                    kills.append({**found, "differs": wrong})
                print(json.dumps({**found, "differs": wrong}), flush=True)
            facts = {"machine": machine(), "versions": versions(), "kills": kills}
            replace_file(DEPLOYED, (json.dumps(facts, indent=1) + "\n").encode(), mode=0o644)
            write_page()


if __name__ == "__main__":
    main(sys.argv[1:])
