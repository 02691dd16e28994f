"""What happens to a deployed run when a process is killed, a site is cut off, or the disk is full.

Each case runs two hospitals on loopback, with TLS and node keys, disturbs one process in one phase, lets the
operator do what docs/operations.md says, and compares the final model with that of an undisturbed run.

    python -m perennial.benchmarks.continuity [CASE...]   writes benchmarks/results/continuity.jsonl and .md
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from perennial.benchmarks.environment import machine, versions
from perennial.benchmarks.loopback import ENTERED, Deployment, digit_folders
from perennial.benchmarks.markdown import age
from perennial.benchmarks.split_keys import split_key_of
from perennial.benchmarks.table import RESULTS_REVISION
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process

ROOT = Path(__file__).resolve().parents[1]

SITES = ["graz", "linz"]
RESULTS = ROOT / "benchmarks" / "results" / "continuity.jsonl"
EXPERIMENT: dict[str, Any] = {
    "name": "hospitals",
    "data": {
        "source": "folder",
        "classes": [f"digit-{digit}" for digit in range(10)],
        "image_size": 8,
        "color": "gray",
        "normalise": {"mean": 0.3, "std": 0.35},
    },
    "tasks": {"count": 2, "rounds": 1},
    "model": {"name": "small_cnn"},
    "rounds": {"wait_for": 2, "quorum": 2, "join_timeout": 120, "deadline": 60},
    # long enough for a kill to meet a site at work
    "learner": {
        "epochs": 20,
        "optimizer": {"lr": 0.02, "momentum": 0.9},
        "distillation": {"weight": 1.0},
        "memory": {"per_class": 4},
    },
}


@dataclass
class Running:
    """A federation with the run under way, and what a case needs to find its moment."""

    deployment: Deployment
    changes: dict[str, Any]

    def submit(self) -> None:
        self.deployment.deploy("submit", self.deployment.folder / "experiment.yaml")

    @property
    def run_folder(self) -> Path:
        return self.deployment.operator / "state" / "runs" / "hospitals"

    def wait(self, condition: Callable[[], object], what: str, seconds: float = 180) -> None:
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until:
                raise TimeoutError(f"{what}: not within {seconds} s\n{self.deployment.logs()}")
            time.sleep(0.02)

    def children(self, name: str, word: str) -> list[int]:
        """Descendants of a long-lived process whose name or command line contains a word.

        Flower gives each app a session of its own, so sessions do not show them.
        """
        command = ["ps", "-A", "-o", "pid=,ppid=,comm=,args="]
        listed = subprocess.run(command, capture_output=True, text=True, check=True)
        rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
        family = {self.deployment.process_id(name)}
        for _ in range(4):
            family |= {int(pid) for pid, parent, _ in rows if int(parent) in family}
        return [int(pid) for pid, _, arguments in rows if int(pid) in family and word in arguments]

    def training(self, site: str) -> bool:
        """Whether the site has been given a training request and works on it."""
        return "train message" in self.deployment.log(site) and bool(self.children(site, "flwr-clientapp"))

    def released(self, site: str) -> bool:
        """Whether the site has charged a release to its ledger."""
        return (self.deployment.folder / site / "state" / "ledger.jsonl").exists()

    def events(self) -> list[dict[str, Any]]:
        path = self.run_folder / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kill_child(running: Running, name: str, word: str) -> None:
    found = running.children(name, word)
    if not found:
        raise RuntimeError(f"{name}: no {word} to kill")
    for process in found:
        os.kill(process, signal.SIGKILL)


def restart_superlink(running: Running) -> None:
    running.deployment.kill("superlink")
    running.deployment.start_superlink()


def superlink_idle(running: Running) -> None:
    restart_superlink(running)
    running.submit()


def superlink_training(running: Running) -> None:
    running.submit()
    running.wait(lambda: running.training("graz"), "training")
    restart_superlink(running)


def serverapp_sending(running: Running) -> None:
    running.submit()
    running.wait(lambda: any(event["event"] == "sites" for event in running.events()), "the first exchange")
    kill_child(running, "superlink", "flwr-serverapp")


def serverapp_training(running: Running) -> None:
    running.submit()
    running.wait(lambda: running.training("graz"), "training")
    kill_child(running, "superlink", "flwr-serverapp")


def serverapp_aggregating(running: Running) -> None:
    running.submit()
    running.wait(lambda: running.released("graz") and running.released("linz"), "both updates")
    running.wait(lambda: "Push replies" in running.deployment.log("superlink"), "a reply")
    kill_child(running, "superlink", "flwr-serverapp")


def serverapp_checkpointing(running: Running) -> None:
    running.submit()
    running.wait(lambda: any((running.run_folder / "checkpoint").glob("*")), "the first checkpoint")
    kill_child(running, "superlink", "flwr-serverapp")


def supernode_idle(running: Running) -> None:
    running.deployment.restart_site("linz")
    running.submit()


def supernode_training(running: Running) -> None:
    running.submit()
    running.wait(lambda: running.training("linz"), "training")
    running.deployment.restart_site("linz")


def clientapp_training(running: Running) -> None:
    running.submit()
    running.wait(lambda: running.training("linz"), "training")
    kill_child(running, "linz", "flwr-clientapp")


def clientapp_replying(running: Running) -> None:
    running.submit()
    running.wait(lambda: running.released("linz"), "the release")
    kill_child(running, "linz", "flwr-clientapp")


def site_cut_off(running: Running) -> None:
    running.submit()
    running.wait(lambda: running.training("linz"), "training")
    session = running.deployment.process_id("linz")
    os.killpg(session, signal.SIGSTOP)
    time.sleep(40)
    os.killpg(session, signal.SIGCONT)


def site_never_returns(running: Running) -> None:
    running.submit()
    running.wait(lambda: running.training("linz"), "training")
    running.deployment.kill("linz")


def disk_full(running: Running) -> None:
    filler = running.deployment.operator / "state" / "runs" / "filler"
    running.submit()
    running.wait(lambda: running.training("linz"), "training")
    with open(filler, "wb") as file:
        try:
            while True:
                file.write(b"\0" * 2**16)
                file.flush()
        except OSError:
            pass
    running.deployment.wait_for_run("hospitals", 300)
    filler.unlink()


@dataclass(frozen=True)
class Case:
    """One failure that a run must survive.

    process and phase: for the table.
    changes: to the experiment.
    small_disk: run folders on 24 MB.
    """

    process: str
    phase: str
    disturb: Callable[[Running], None]
    changes: dict[str, Any]
    small_disk: bool = False


ONE_IS_ENOUGH = {"rounds": {"wait_for": 2, "quorum": 1, "join_timeout": 120, "deadline": 45}}
CASES = {
    "superlink_idle": Case("SuperLink", "idle", superlink_idle, {}),
    "superlink_training": Case("SuperLink", "training", superlink_training, {}),
    "serverapp_sending": Case("ServerApp", "sending", serverapp_sending, {}),
    "serverapp_training": Case("ServerApp", "training", serverapp_training, {}),
    "serverapp_aggregating": Case("ServerApp", "replies arriving", serverapp_aggregating, {}),
    "serverapp_checkpointing": Case("ServerApp", "checkpointing", serverapp_checkpointing, {}),
    "supernode_idle": Case("SuperNode", "idle", supernode_idle, {}),
    "supernode_training": Case("SuperNode", "training", supernode_training, {}),
    "clientapp_training": Case("ClientApp", "training", clientapp_training, {}),
    "clientapp_replying": Case("ClientApp", "charged, not yet sent", clientapp_replying, {}),
    "site_cut_off": Case("site", "cut off for 40 s while training", site_cut_off, {}),
    "site_never_returns": Case("site", "gone for good", site_never_returns, ONE_IS_ENOUGH),
    "disk_full": Case("operator's disk", "full while a round runs", disk_full, {}, small_disk=True),
}


def main() -> None:
    """Run the named cases, or all."""
    wanted = sys.argv[1:] or list(CASES)
    for name in wanted:
        row = run_case(name, CASES[name])
        print(json.dumps(row), flush=True)
        # read again: another process may have run other cases meanwhile
        lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
        found = {row["case"]: row for row in map(json.loads, lines)} | {name: row}
        rows = [json.dumps(found[case]) for case in CASES if case in found]
        RESULTS.write_text("\n".join(rows) + "\n")
        RESULTS.with_suffix(".md").write_text(as_markdown([found[case] for case in CASES if case in found]))


def run_case(name: str, case: Case) -> dict[str, Any]:
    """One case; what was seen."""
    start = time.monotonic()
    with Deployment(SITES) as deployment:
        prepare(deployment, case)
        running = Running(deployment, case.changes)
        case.disturb(running)
        resumed = 0
        while not (status := settle(deployment)).endswith("completed") and resumed < 3:
            deployment.deploy("resume", "hospitals")
            resumed += 1
        summary = running.run_folder / "summary.json"
        facts = json.loads(summary.read_text()) if summary.exists() else {}
        rounds = [event for event in running.events() if event["event"] == "round"]
        expected = undisturbed(deployment, case, running.run_folder) if facts else ""
        ledgers = {
            site: len((deployment.folder / site / "state" / "ledger.jsonl").read_text().splitlines())
            for site in SITES
            if running.released(site)
        }
    return {
        "case": name,
        "process": case.process,
        "phase": case.phase,
        "status": status,
        "resumed": resumed,
        "rounds": len(rounds),
        "skipped": sum(event["skipped"] for event in rounds),
        "ledger_lines": ledgers,
        "same_model": facts.get("model_sha256") == expected,
        "seconds": round(time.monotonic() - start),
        "revision": RESULTS_REVISION,
        "versions": versions(),
        "machine": machine(),
    }


def settle(deployment: Deployment) -> str:
    return deployment.wait_for_run("hospitals", 900)


def prepare(deployment: Deployment, case: Case) -> None:
    """Operator, sites, approvals."""
    deployment.init()
    if case.small_disk:
        runs = deployment.operator / "state" / "runs"
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(runs)], check=True)
    digit_folders(deployment.folder / "data", SITES, 150)
    experiment = {**EXPERIMENT, **case.changes}
    path = deployment.folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(experiment))
    deployment.start_superlink()
    fab, digest = deployment.deploy("stage", path).split()[-2:]
    for name in SITES:
        deployment.make_site(name)
        deployment.edit_site(name, data={"path": str(deployment.folder / "data" / name)})
        deployment.perennial("site", "approve", fab, digest, "--site", deployment.site_file(name))
        deployment.deploy("register", name)
        deployment.start_site(name)
    for name in SITES:
        deployment.wait_for_log(name, ENTERED)


def undisturbed(deployment: Deployment, case: Case, run: Path) -> str:
    """model_sha256 of an undisturbed run of the same sites, whose data the same key divides."""
    experiment = {**EXPERIMENT, **case.changes}
    data = {**experiment["data"], "path": str(deployment.folder / "data"), "partition": {"kind": "natural"}}
    simulated = deployment.folder / "simulated.yaml"
    simulated.write_text(yaml.safe_dump({**experiment, "data": data}))
    with split_key_of(run):
        here = run_in_process(RunSettings(str(simulated), runs=str(deployment.folder / "here")))
    return str(here["model_sha256"])


def as_markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        *([old, ""] if (old := age(rows)) else []),
        "| disturbed | phase | the operator did | ended | rounds | ledger lines | same model |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        did = "nothing" if not row["resumed"] else f"`perennial deploy resume`, {row['resumed']} times"
        did = did.replace(", 1 times", "")
        ledgers = ", ".join(f"{site} {count}" for site, count in row["ledger_lines"].items())
        same = "yes, bit for bit" if row["same_model"] else "no"
        rounds = f"{row['rounds']}, {row['skipped']} skipped" if row.get("skipped") else row["rounds"]
        cells = (row["process"], row["phase"], did, row["status"], rounds, ledgers, same)
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
