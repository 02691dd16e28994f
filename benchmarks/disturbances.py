"""The ways in which benchmarks/continuity.py disturbs a deployed run, each at its moment."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perennial.benchmarks.loopback import Deployment
from perennial.live.run_state import RunState


@dataclass
class Running:
    """A federation with the run under way, and what a case needs to find its moment."""

    deployment: Deployment
    changes: dict[str, Any]
    noticed: float | None = None
    """Seconds from the disturbance until the operator's page says that something is wrong."""

    def disturbed(self) -> None:
        """From now on, look at what the operator's page says."""
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        began, state = time.monotonic(), RunState(self.run_folder)
        while time.monotonic() - began < 120:
            state.read()
            if state.status in ("silent", "ended", "waiting", "paused") or any(
                site.status in ("refused", "failed", "silent", "offline") for site in state.sites()
            ):
                self.noticed = time.monotonic() - began
                return
            time.sleep(0.2)

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


def superexec_at_site(running: Running) -> None:
    running.submit()
    running.wait(lambda: running.training("linz"), "training")
    end_by(running, "linz", "superexec_process", signal.SIGKILL)


def superexec_stopped(running: Running) -> None:
    running.submit()
    running.wait(lambda: running.training("linz"), "training")
    end_by(running, "linz", "superexec_process", signal.SIGSTOP)


def fork_server(running: Running) -> None:
    running.submit()
    running.wait(lambda: running.training("linz"), "training")
    end_by(running, "linz", "fork_server.py", signal.SIGKILL)


def end_by(running: Running, site: str, word: str, how: signal.Signals) -> None:
    """Disturb a helper of a site, whose SuperNode must end with it; then do as a service manager does."""
    running.disturbed()
    os.kill(min(running.children(site, word)), how)
    running.deployment.wait_for_end(site, 60)
    running.deployment.restart_site(site)


def superexec_at_operator(running: Running) -> None:
    running.submit()
    running.wait(lambda: running.training("linz"), "training")
    running.disturbed()
    os.kill(min(running.children("superlink", "superexec_process")), signal.SIGKILL)
    running.deployment.wait_for_end("superlink", 60)
    restart_superlink(running)


def rotated(running: Running) -> None:
    running.submit()
    running.wait(lambda: running.training("linz"), "training")
    running.deployment.deploy("rotate")
    running.disturbed()
    restart_superlink(running)


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
    "superexec_at_site": Case("SuperExec", "of a site, training", superexec_at_site, {}),
    "superexec_stopped": Case("SuperExec", "of a site, stopped (SIGSTOP)", superexec_stopped, {}),
    "fork_server": Case("fork server", "of a site, training", fork_server, {}),
    "superexec_at_operator": Case("SuperExec", "of the operator, training", superexec_at_operator, {}),
    "rotated": Case("SuperLink", "`perennial deploy rotate` while training", rotated, {}),
    "site_cut_off": Case("site", "cut off for 40 s while training", site_cut_off, {}),
    "site_never_returns": Case("site", "gone for good", site_never_returns, ONE_IS_ENOUGH),
    "disk_full": Case("operator's disk", "full while a round runs", disk_full, {}, small_disk=True),
}
