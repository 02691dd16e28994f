"""What happens to a deployed run when a process is killed, a site is cut off, or the disk is full.

Each case runs two hospitals on loopback, with TLS and node keys, disturbs one process in one phase, lets the
operator do what docs/operations.md says, and compares the final model with that of an undisturbed run. The
operator's pages are followed all the while: what they say is wrong, and how soon.

    python -m benchmarks.continuity [CASE...]   writes benchmarks/results/continuity.jsonl and .md
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.disturbances import CASES, Case, Running
from benchmarks.environment import machine, versions
from benchmarks.loopback import Deployment, QuickDeployment, digit_folders
from benchmarks.markdown import age
from benchmarks.split_keys import split_key_of
from benchmarks.table import RESULTS_REVISION
from benchmarks.watched_page import WatchedPage
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process

ROOT = Path(__file__).resolve().parents[1]

SITES = ["graz", "linz"]
RESULTS = ROOT / "benchmarks" / "results" / "continuity.jsonl"
PAGES = ("/", "/runs/hospitals")
AFTERWARDS = 3.0
"""Seconds after the end in which the pages show it."""
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
        "preset": "none",
        "epochs": 20,
        "optimizer": {"lr": 0.02, "momentum": 0.9},
        "distillation": {"weight": 1.0},
        "memory": {"per_class": 4},
    },
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
    with QuickDeployment(SITES) as deployment:
        prepare(deployment, case)
        address = deployment.start_pages()
        running = Running(deployment, case.changes, [WatchedPage(address, path) for path in PAGES])
        case.disturb(running)
        resumed = 0
        while not (status := settle(deployment)).endswith("completed") and resumed < 3:
            deployment.deploy("resume", "hospitals")
            resumed += 1
        time.sleep(AFTERWARDS)
        noticed = running.noticed()
        left = [said.text for page in running.pages for said in page.now()]
        for page in running.pages:
            page.close()
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
        "noticed": [
            {"seconds": round(seen.seconds, 1), "text": seen.said.text, "remedy": seen.said.remedy}
            for seen in noticed
        ],
        "left": left,
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
    digit_folders(deployment.folder / "data", SITES, 150)
    path = deployment.folder / "experiment.yaml"
    path.write_text(yaml.safe_dump({**EXPERIMENT, **case.changes}))
    deployment.prepare(path, lambda site: {"data": {"path": str(deployment.folder / "data" / site)}})
    if case.before is not None:
        case.before(deployment)
    deployment.start_sites()


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
        "| disturbed | phase | the operator's page said | the operator did | ended | rounds | ledger lines | "
        "same model |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        did = "nothing" if not row["resumed"] else f"`perennial deploy resume`, {row['resumed']} times"
        did = did.replace(", 1 times", "")
        ledgers = ", ".join(f"{site} {count}" for site, count in row["ledger_lines"].items())
        same = "yes, bit for bit" if row["same_model"] else "no"
        rounds = f"{row['rounds']}, {row['skipped']} skipped" if row.get("skipped") else row["rounds"]
        said = said_in_words(row["noticed"])
        cells = (row["process"], row["phase"], said, did, row["status"], rounds, ledgers, same)
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    made = {row["case"] for row in rows}
    if left := [f"{case.process} ({case.phase})" for name, case in CASES.items() if name not in made]:
        lines += ["", f"**Not run since the pages are watched too:** {'; '.join(left)}."]
    return "\n".join(lines) + "\n"


def said_in_words(noticed: list[dict[str, Any]]) -> str:
    """What the page said first, and what it advised first, with seconds since the disturbance."""
    if not noticed:
        return "nothing"
    first = noticed[0]
    advised = next((seen for seen in noticed if seen["remedy"]), None)
    words = f"after {first['seconds']} s: {first['text']}"
    if advised is not None and advised != first:
        words += f"; after {advised['seconds']} s: {advised['text']}"
    return words + (f" *{advised['remedy']}*" if advised is not None else "")


if __name__ == "__main__":
    main()
