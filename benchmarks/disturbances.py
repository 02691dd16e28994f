"""The ways in which benchmarks/continuity.py disturbs a deployed run, each at its moment."""

import datetime
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from benchmarks.loopback import Deployment
from benchmarks.watched_page import Seen, WatchedPage
from perennial.deploy.certificates import read_validity
from perennial.deploy.federation import OperatorFolder

CLOCK = "linz.clock"
SHORT_LIFE = 120
TELEPHONE = 10.0
"""Seconds from what the operator's page says until the hospital has put it right."""


@dataclass
class Running:
    """A federation with the run under way, and what a case needs to find its moment."""

    deployment: Deployment
    changes: dict[str, Any]
    pages: Sequence[WatchedPage] = ()
    """What somebody watches: the overview, and the run's own page."""
    moment: float | None = None
    """When it was disturbed (time.monotonic)."""

    def disturbed(self) -> None:
        """Now; from here on, what the pages say counts as noticed."""
        self.moment = time.monotonic()

    def noticed(self) -> list[Seen]:
        """What the pages have begun to say since the disturbance, the earliest first."""
        moment = self.moment
        found = [] if moment is None else [seen for page in self.pages for seen in page.new_since(moment)]
        latest_first = sorted(found, key=lambda seen: -seen.seconds)
        first = {seen.said.cause: seen for seen in latest_first}
        return sorted(first.values(), key=lambda seen: seen.seconds)

    def wait_until_noticed(self, seconds: float = 60) -> None:
        """Return when a page says that something is wrong, or after some seconds if none does."""
        until = time.monotonic() + seconds
        while self.pages and not self.noticed() and time.monotonic() < until:
            time.sleep(0.1)

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


def training_begins(running: Running, site: str = "linz") -> None:
    """The run is submitted, and a site trains."""
    running.submit()
    running.wait(lambda: running.training(site), "training")


def kill_child(running: Running, name: str, word: str) -> None:
    found = running.children(name, word)
    if not found:
        raise RuntimeError(f"{name}: no {word} to kill")
    running.disturbed()
    for process in found:
        os.kill(process, signal.SIGKILL)


def kill_superlink(running: Running) -> None:
    """Kill it; the operator starts it again when the page says so."""
    running.disturbed()
    running.deployment.kill("superlink")
    running.wait_until_noticed()
    running.deployment.start_superlink()


def kill_supernode(running: Running, site: str) -> None:
    """Kill it; its service manager starts it again once the page has said so."""
    running.disturbed()
    running.deployment.kill(site)
    running.wait_until_noticed()
    running.deployment.restart_site(site)


def superlink_idle(running: Running) -> None:
    kill_superlink(running)
    running.submit()


def superlink_training(running: Running) -> None:
    training_begins(running, "graz")
    kill_superlink(running)


def serverapp_sending(running: Running) -> None:
    running.submit()
    running.wait(lambda: any(event["event"] == "sites" for event in running.events()), "the first exchange")
    kill_child(running, "superlink", "serverapp_process")


def serverapp_training(running: Running) -> None:
    training_begins(running, "graz")
    kill_child(running, "superlink", "serverapp_process")


def serverapp_aggregating(running: Running) -> None:
    running.submit()
    running.wait(lambda: running.released("graz") and running.released("linz"), "both updates")
    running.wait(lambda: "Push replies" in running.deployment.log("superlink"), "a reply")
    kill_child(running, "superlink", "serverapp_process")


def serverapp_checkpointing(running: Running) -> None:
    running.submit()
    running.wait(lambda: any((running.run_folder / "checkpoint").glob("*")), "the first checkpoint")
    kill_child(running, "superlink", "serverapp_process")


def supernode_idle(running: Running) -> None:
    kill_supernode(running, "linz")
    running.submit()


def supernode_training(running: Running) -> None:
    training_begins(running)
    kill_supernode(running, "linz")


def clientapp_training(running: Running) -> None:
    training_begins(running)
    kill_child(running, "linz", "flwr-clientapp")


def clientapp_replying(running: Running) -> None:
    running.submit()
    running.wait(lambda: running.released("linz"), "the release")
    kill_child(running, "linz", "flwr-clientapp")


def superexec_at_site(running: Running) -> None:
    training_begins(running)
    end_by(running, "linz", "superexec_process", signal.SIGKILL)


def superexec_stopped(running: Running) -> None:
    training_begins(running)
    end_by(running, "linz", "superexec_process", signal.SIGSTOP)


def fork_server(running: Running) -> None:
    training_begins(running)
    end_by(running, "linz", "fork_server.py", signal.SIGKILL)


def end_by(running: Running, site: str, word: str, how: signal.Signals) -> None:
    """Disturb a helper of a site, whose SuperNode must end with it; then do as a service manager does."""
    running.disturbed()
    os.kill(min(running.children(site, word)), how)
    running.deployment.wait_for_end(site, 60)
    running.deployment.restart_site(site)


def superexec_at_operator(running: Running) -> None:
    training_begins(running)
    running.disturbed()
    os.kill(min(running.children("superlink", "superexec_process")), signal.SIGKILL)
    running.deployment.wait_for_end("superlink", 60)
    running.wait_until_noticed()
    running.deployment.kill("superlink")
    running.deployment.start_superlink()


def rotated(running: Running) -> None:
    training_begins(running)
    running.deployment.deploy("rotate")
    running.disturbed()
    running.deployment.kill("superlink")
    running.deployment.start_superlink()


def site_cut_off(running: Running) -> None:
    training_begins(running)
    session = running.deployment.process_id("linz")
    running.disturbed()
    os.killpg(session, signal.SIGSTOP)
    time.sleep(40)
    os.killpg(session, signal.SIGCONT)


def site_never_returns(running: Running) -> None:
    training_begins(running)
    running.disturbed()
    running.deployment.kill("linz")


def disk_full(running: Running) -> None:
    """The operator makes room once the run has ended for lack of it."""
    training_begins(running)
    filler = fill(running, running.run_folder.parent)
    running.deployment.wait_for_run("hospitals", 300)
    filler.unlink()


def site_disk_full(running: Running) -> None:
    """The hospital makes room once the operator, whose page says so, has telephoned."""
    training_begins(running)
    filler = fill(running, running.deployment.folder / "linz" / "state")
    running.wait_until_noticed(120)
    time.sleep(TELEPHONE)
    filler.unlink()


def fill(running: Running, folder: Path) -> Path:
    """A file that takes all that is left of a disk."""
    filler = folder / "filler"
    running.disturbed()
    with open(filler, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"\0" * 2**12)
    return filler


def clock_jumps(running: Running) -> None:
    """A hospital's clock goes an hour ahead, and back once the operator has telephoned."""
    training_begins(running)
    clock = running.deployment.folder / CLOCK
    running.disturbed()
    clock.write_text("3600")
    running.wait_until_noticed(120)
    time.sleep(TELEPHONE)
    clock.write_text("0")
    running.deployment.restart_site("linz")


def certificate_expires(running: Running) -> None:
    """The SuperLink's certificate ends while a site is away, which cannot come back before it is renewed."""
    training_begins(running)
    running.deployment.kill("linz")
    (served,) = read_validity(running.deployment.operator / "certificates" / "server.pem")
    time.sleep(max(0.0, served.ends.timestamp() - time.time()))
    running.disturbed()
    running.deployment.start_site("linz")
    running.wait_until_noticed()
    time.sleep(TELEPHONE)
    running.deployment.deploy("rotate")
    running.deployment.kill("superlink")
    running.deployment.start_superlink()
    running.deployment.restart_site("linz")


@dataclass(frozen=True)
class Case:
    """One failure that a run must survive.

    process and phase: for the table.
    changes: to the experiment.
    before: makes the machine ready once every site is registered and none has started; None: nothing.
    """

    process: str
    phase: str
    disturb: Callable[[Running], None]
    changes: dict[str, Any]
    before: Callable[[Deployment], None] | None = None


def small_runs(deployment: Deployment) -> None:
    deployment.mount_small_disk(deployment.operator / "state" / "runs", 24)


def small_state(deployment: Deployment) -> None:
    deployment.mount_small_disk(deployment.folder / "linz" / "state", 24)


def movable_clock(deployment: Deployment) -> None:
    """The wall clock of linz is off by the seconds in a file. Needs a C compiler."""
    library, clock = deployment.folder / "moved_clock.so", deployment.folder / CLOCK
    source = Path(__file__).with_name("moved_clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source)], check=True)
    clock.write_text("0")
    deployment.environment["linz"] = {"LD_PRELOAD": str(library), "MOVED_CLOCK": str(clock)}


def short_lived(deployment: Deployment) -> None:
    """The SuperLink starts anew with a certificate that ends in SHORT_LIFE seconds."""
    operator = OperatorFolder(deployment.operator)
    served = operator.certificates / "server.pem"
    old = x509.load_pem_x509_certificate(served.read_bytes())
    signer = serialization.load_pem_private_key(operator.authority_key.read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    new = x509.CertificateBuilder(
        old.issuer,
        old.subject,
        old.public_key(),
        old.serial_number,
        old.not_valid_before_utc,
        datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=SHORT_LIFE),
        list(old.extensions),
    )
    served.write_bytes(new.sign(signer, hashes.SHA384()).public_bytes(serialization.Encoding.PEM))
    deployment.kill("superlink")
    deployment.start_superlink()


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
    "disk_full": Case("operator's disk", "full while a round runs", disk_full, {}, small_runs),
    "site_disk_full": Case("site's disk", "full while it trains", site_disk_full, {}, small_state),
    "clock_jumps": Case("site's clock", "an hour ahead while it trains", clock_jumps, {}, movable_clock),
    "certificate_expires": Case(
        "certificate",
        "ends while a site is away",
        certificate_expires,
        {},
        short_lived,
    ),
}
