"""The same app at two sites, started by Perennial's commands and by Flower's own, side by side.

    python -m benchmarks.stock_flower

starts one federation after the other, TLS and node keys on, and keeps all of them up; then each runs rounds
of next to no work. It writes benchmarks/results/stock_flower.json and .md; docs/stock_flower.md shows
the table.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.deployment import experiment
from benchmarks.environment import machine, versions
from benchmarks.loopback import LOOPBACK, Deployment, QuickDeployment
from benchmarks.marked_blocks import with_blocks
from benchmarks.processes import BYTECODE, family
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.files import replace_file

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "stock_flower.md"
RESULTS = ROOT / "benchmarks" / "results" / "stock_flower.json"
BINARIES = Path(sys.executable).parent
SITES = ["site-0", "site-1"]
ROUNDS = 4
TURNS = 1
PATIENCE = 900.0
"""Seconds for a run: other work may share the cores."""
OUR_SUPEREXEC = [sys.executable, "-m", "perennial.deploy.superexec_process"]
POLL = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05"}
"""How often Flower's SuperExec looks for a task: its default is every second."""
WAYS = {
    "wrapped": "`perennial deploy start`, `perennial site start`",
    "mixed": "`perennial deploy start`; `flower-supernode` with our SuperExec",
    "warm": "`flower-superlink`, `flower-supernode`, both with our SuperExec",
    "stock": "`flower-superlink`, `flower-supernode`",
}


class StockDeployment(QuickDeployment):
    """A federation of `flower-superlink`, `flower-supernode` and `flwr`.

    Keys, certificates, approvals and the app's folder are Perennial's files, made as for any other. warm: the
    SuperExecs are ours, started beside them (`--isolation process`).
    """

    def __init__(self, sites: list[str], *, warm: bool = False) -> None:
        super().__init__(sites)
        self.warm = warm

    def start_superlink(self) -> None:
        certificates, state = self.operator / "certificates", self.operator / "state"
        authority = certificates / "ca.crt"
        self._flower(
            "superlink",
            self.operator,
            ["flower-superlink", "--enable-supernode-auth", "--disable-runtime-dependency-installation"],
            *("--ssl-ca-certfile", authority, "--ssl-certfile", certificates / "server.pem"),
            *("--ssl-keyfile", certificates / "server.key", "--database", state / "superlink.db"),
            *("--host", LOOPBACK, "--port", self.control),
            *("--fleet-api-type", "grpc-rere", "--fleet-api-address", f"{LOOPBACK}:{self.fleet}"),
        )
        self._wait_for_ports("superlink", self.control, self.fleet)
        if self.warm:
            runtime = ("--runtime-api-address", f"{LOOPBACK}:{self.control}")
            self._flower(
                "superlink-exec", self.operator, OUR_SUPEREXEC, *runtime, "--root-certificates", authority
            )

    def start_site(self, name: str) -> None:
        own = self.folder / name
        self._flower(
            name,
            own,
            ["flower-supernode", "--superlink", f"{LOOPBACK}:{self.fleet}"],
            *("--root-certificates", own / "ca.crt", "--auth-supernode-private-key", own / "node.key"),
            *("--port", self.ports[name], "--node-config", f'site="{self.site_file(name)}"'),
        )
        if self.warm:
            runtime = ("--runtime-api-address", f"{LOOPBACK}:{self.ports[name]}")
            self._flower(f"{name}-exec", own, OUR_SUPEREXEC, "--insecure", *runtime)

    def flwr(self, *arguments: str | Path) -> dict[str, Any]:
        """One `flwr` command; its answer."""
        done = subprocess.run(
            [BINARIES / "flwr", *arguments, "--format", "json"],
            env=self._variables(self.operator),
            cwd=self.operator,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not done.returncode, f"{arguments}: {done.stdout}{done.stderr}{self.logs()}"
        return json.loads(done.stdout[done.stdout.find("{") :])

    def register(self, name: str) -> None:
        """Tell the SuperLink a site's key; no name goes with it."""
        self.flwr("supernode", "register", self.operator / "sites" / f"{name}.pub", "federation")

    def submit(self, path: Path, name: str) -> None:
        """Start a run of a staged app by `flwr run`."""
        app, runs = self.operator / "apps" / path.stem, self.operator / "state" / "runs"
        self.flwr("run", app, "federation", "--run-config", f'name="{name}" runs="{runs}"')

    def _variables(self, folder: Path) -> dict[str, str]:
        home = folder / "state" / "flower" if folder == self.operator else folder / "flower"
        path = f"{BINARIES}{os.pathsep}{os.environ['PATH']}"
        own = {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "PATH": path, "PYTHONPATH": str(ROOT)}
        return os.environ | BYTECODE | own | (POLL if self.warm else {})

    def _flower(self, name: str, folder: Path, program: list[str], *arguments: Any) -> None:
        isolation = self.warm and program[0].startswith("flower-su")
        command = [*program, *map(str, arguments), *(["--isolation", "process"] if isolation else [])]
        with open(self.folder / f"{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(
                command,
                cwd=folder,
                env=self._variables(folder) | self.environment.get(name, {}),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


class MixedDeployment(StockDeployment):
    """Flower's SuperNodes at the SuperLink that `perennial deploy start` starts."""

    start_superlink = Deployment.start_superlink


def started(way: str, content: dict[str, Any], turns: int) -> QuickDeployment:
    """A federation of one way, its sites connected and its apps approved: one for each turn."""
    kinds = {"wrapped": QuickDeployment, "mixed": MixedDeployment}
    found = kinds.get(way, StockDeployment)(SITES, **({"warm": way != "stock"} if way != "wrapped" else {}))
    found.environment = {name: BYTECODE for name in ("superlink", *SITES)}
    found.init()
    found.start_superlink()
    for name in SITES:
        found.make_site(name)
        found.edit_site(name, data=None)
        found.register(name) if isinstance(found, StockDeployment) else found.deploy("register", name)
    for turn in range(turns):
        path = found.folder / f"idle-{turn}.yaml"
        path.write_text(yaml.safe_dump({**content, "name": path.stem}))
        fab, digest = found.deploy("stage", path).split()[-2:]
        for name in SITES:
            found.perennial("site", "approve", fab, digest, "--site", found.site_file(name))
    found.start_sites(PATIENCE)
    return found


def finished(found: QuickDeployment, turn: int) -> dict[str, Any]:
    """Run the app of one turn to its end: seconds between rounds, processor seconds, the model's hash."""
    path = found.folder / f"idle-{turn}.yaml"
    folder = found.operator / "state" / "runs" / path.stem
    if isinstance(found, StockDeployment):
        found.submit(path, path.stem)
    else:
        found.deploy("submit", path)
    until = time.monotonic() + PATIENCE
    used, seconds = [0.0], list[float]()
    while not (folder / "summary.json").exists():
        assert time.monotonic() < until, f"no end of {folder}: {found.logs()}"
        time.sleep(0.1)
        journal = folder / "events.jsonl"
        lines = journal.read_text().splitlines() if journal.exists() else []
        rounds = [event for event in map(json.loads, lines) if event["event"] == "round"]
        if len(rounds) > len(seconds):
            assert all(event["participants"] == SITES for event in rounds), rounds
            seconds = [event["seconds"] for event in rounds]
            used.append(sum(sum(family(found.process_id(name)).values()) for name in found.processes()))
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "seconds": [round(value, 2) for value in seconds[1:]],
        "processor": (used[-1] - used[1]) / max(1, len(used) - 2),
        "model": summary["model_sha256"],
    }


def measure(ways: tuple[str, ...] = tuple(WAYS), rounds: int = ROUNDS, turns: int = TURNS) -> dict[str, Any]:
    """All ways beside each other; what each did, and the model's hash of the same run in one process."""
    content = experiment("idle", {"name": "mlp"}, len(SITES), rounds)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    with ExitStack() as stack:
        up = {way: stack.enter_context(started(way, content, turns)) for way in ways}
        print("all are up", flush=True)
        load = [os.getloadavg()[0]]
        for turn in range(turns):
            for way in ways if turn % 2 == 0 else ways[::-1]:
                found[way].append(finished(up[way], turn))
                load.append(os.getloadavg()[0])
                print(way, found[way][-1], flush=True)
        first = up[ways[0]].folder
        here = run_in_process(RunSettings(str(first / "idle-0.yaml"), runs=str(first / "here")))
    rows: dict[str, Any] = {}
    for way, runs in found.items():
        samples = [value for run in runs for value in run["seconds"]]
        rows[way] = {
            "round_seconds": round(median(samples), 2),
            "samples": samples,
            "processor_seconds": round(median(run["processor"] for run in runs), 2),
            "same_model_as_in_process": {run["model"] for run in runs} == {here["model_sha256"]},
        }
    return {
        "ways": rows,
        "load": [round(min(load), 1), round(max(load), 1)],
        "versions": versions(),
        "machine": machine(),
    }


def as_markdown(found: dict[str, Any]) -> str:
    """The table: each way against ours, and under what load."""
    ours = found["ways"]["wrapped"]
    lines = [
        "| started by | seconds of a round | times ours | processor, times ours | same model as in process |",
        "| --- | --- | --- | --- | --- |",
    ]
    for way, row in found["ways"].items():
        times = row["round_seconds"] / ours["round_seconds"]
        work = row["processor_seconds"] / ours["processor_seconds"]
        same = "yes" if row["same_model_as_in_process"] else "no"
        lines.append(f"| {WAYS[way]} | {row['round_seconds']:g} | {times:.1f} | {work:.1f} | {same} |")
    low, high = found["load"]
    lines += [
        "",
        f"Medians over {len(ours['samples'])} rounds of next to no work at two sites, all processes on one "
        f"machine, all federations up at once, run in turns. Other work ran meanwhile: the load of its "
        f"processors was {low:g} to {high:g}, so that the seconds are upper bounds.",
        "",
        f"Measured on: {found['machine']}; "
        + ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        + ".",
    ]
    return "\n".join(lines) + "\n"


def rendered(page: str) -> str:
    """The page with the committed table."""
    return with_blocks(page, {"stock flower": as_markdown(json.loads(RESULTS.read_text(encoding="utf-8")))})


def main() -> None:
    """Measure, and write down what was found."""
    found = measure()
    replace_file(RESULTS, (json.dumps(found, indent=1) + "\n").encode(), mode=0o644)
    replace_file(RESULTS.with_suffix(".md"), as_markdown(found).encode(), mode=0o644)
    if PAGE.exists():
        replace_file(PAGE, rendered(PAGE.read_text(encoding="utf-8")).encode(), mode=0o644)
    print(as_markdown(found))


if __name__ == "__main__":
    main()
