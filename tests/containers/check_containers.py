"""An operator and two hospitals in containers, over TLS with node keys, each hospital on its own network.

Run by run.sh, which provides the engine and the images; no part of the ordinary test suite.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.server.summary import extract_hashes
from tests.loopback import digit_folders, free_ports
from tests.split_keys import split_key_of

ROOT = Path(__file__).resolve().parents[2]

SITES = ["graz", "linz"]
OWNER = 1000
HOME_LEDGERS = "LEDGERS=${HOME}/.local/state/perennial"
EXPERIMENT = {
    "name": "hospitals",
    "data": {
        "source": "folder",
        "classes": [f"digit-{digit}" for digit in range(10)],
        "image_size": 8,
        "color": "gray",
        "normalise": {"mean": 0.3, "std": 0.35},
    },
    "tasks": {"count": 2, "rounds": 2},
    "rounds": {"wait_for": 2, "quorum": 2, "deadline": 240},
    "model": {"name": "small_cnn"},
    "learner": {
        "preset": "none",
        "optimizer": {"lr": 0.05, "momentum": 0.9},
        "classification": "balanced_softmax",
        "distillation": {"weight": 1.0},
        "memory": {"per_class": 4},
    },
}


def run(*command: str | Path, cwd: Path = ROOT, fails: bool | None = False, seconds: float = 180) -> str:
    """One command; what it said. fails: whether it is expected to, None for either."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=seconds, check=False
    )
    said = done.stdout + done.stderr
    assert fails is None or (done.returncode != 0) == fails, f"{command}: {done.returncode}: {said}"
    return said


def pinned(settings: str, target: str) -> str:
    """The .env of a side, with the test's image in it by its digest, as docs/deploy.md tells to pin it."""
    digest = run("docker", "image", "inspect", "--format", "{{.Id}}", f"perennial-{target}:test").strip()
    found, count = re.subn("(?m)^PERENNIAL_IMAGE=.*$", f"PERENNIAL_IMAGE={digest}", settings)
    assert count == 1 and digest.startswith("sha256:")
    return found


class Federation:
    """The operator's folder, the hospitals' folders, and their containers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.operator = folder, folder / "federation"
        self.project = f"perennial-test-{os.getpid()}"
        self.fleet, self.pages = free_ports(2)
        self.networks = {name: f"{self.project}-{name}" for name in [*SITES, "stranger"]}

    def perennial(self, *arguments: str | Path, fails: bool = False) -> str:
        return run(sys.executable, "-m", "perennial.cli.main", *arguments, fails=fails)

    def deploy(self, command: str, *arguments: str | Path, fails: bool = False) -> str:
        return self.perennial("deploy", command, *arguments, "--folder", self.operator, fails=fails)

    def up_operator(self) -> None:
        self.perennial("deploy", "init", self.operator, "--host", "superlink", "--name", self.project)
        settings = self.operator / ".env"
        text = pinned(settings.read_text(), "operator")
        text = text.replace("FLEET_BIND=0.0.0.0", "FLEET_BIND=127.0.0.1")
        text = text.replace("FLEET_PORT=9092", f"FLEET_PORT={self.fleet}")
        settings.write_text(text.replace("PAGES_PORT=8080", f"PAGES_PORT={self.pages}"))
        run("docker", "compose", "config", "--quiet", cwd=self.operator)
        run("docker", "compose", "-f", "compose.yaml", "-f", "gpu.yaml", "config", "-q", cwd=self.operator)
        self.compose_up(self.operator)
        for name, network in self.networks.items():
            run("docker", "network", "create", "--internal", network)
            alias = ("--alias", "superlink", network, f"{self.project}-superlink-1")
            run("docker", "network", "connect", *alias)
            assert name
        self.wait(lambda: "healthy" in self.inspect_health(f"{self.project}-superlink-1"), "the SuperLink")

    def compose_up(self, folder: Path) -> None:
        run("docker", "compose", "up", "--detach", "--no-build", "--pull", "never", cwd=folder)

    def make_site(self, name: str) -> Path:
        """A hospital's folder as its engineer makes it; returns its path."""
        folder = self.folder / name
        folder.mkdir()
        self.perennial("site", "open", "--folder", folder)
        self.deploy("add-site", name, folder / "node.key.pub")
        self.perennial("site", "open", self.operator / "bundles" / f"{name}.tar.gz", "--folder", folder)
        site = folder / "site.yaml"
        content = yaml.safe_load(site.read_text())
        # this hospital trusts its operator: what the template ships refuses plain training
        trusting = {"answers": ["train", "evaluate"], "min_samples": 1, "require_privacy": "none"}
        content["policy"] |= trusting | {"max_epsilon": None}
        site.write_text(yaml.safe_dump(content))
        settings = folder / ".env"
        text = pinned(settings.read_text(), "site")
        text = text.replace("DATA=./data", f"DATA={self.folder / 'data' / name}")
        # the home is root's here, and the container's user writes
        ledgers = folder / "ledgers"
        ledgers.mkdir(exist_ok=True)
        settings.write_text(text.replace(HOME_LEDGERS, f"LEDGERS={ledgers}"))
        (folder / "data").mkdir(exist_ok=True)
        # in the test, a hospital's way out is a network of its own on which there is the SuperLink alone
        network = {"networks": {"out": {"name": self.networks[name], "external": True}}}
        (folder / "compose.override.yaml").write_text(yaml.safe_dump(network))
        self.own(folder)
        return folder

    def own(self, folder: Path) -> None:
        if os.getuid() == 0:
            run("chown", "-R", f"{OWNER}:{OWNER}", folder)

    def approve(self, said: str) -> None:
        fab, digest = re.findall(r"(?m)^(\S+\.fab)\n([0-9a-f]{64})$", said)[0]  # warnings stand beside them
        for name in SITES:
            self.perennial("site", "approve", fab, digest, "--site", self.folder / name / "site.yaml")
            self.own(self.folder / name)

    def container(self, name: str) -> str:
        return f"perennial-{name}-supernode-1"

    def apps_container(self, name: str) -> str:
        return f"perennial-{name}-superexec-clientapp-1"

    def logs(self, container: str) -> str:
        return run("docker", "logs", container, fails=None)

    def inspect_health(self, container: str) -> str:
        return run("docker", "inspect", "--format", "{{.State.Health.Status}}", container, fails=None)

    def events(self, name: str) -> list[dict[str, object]]:
        path = self.operator / "state" / "runs" / name / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, condition, what: str, seconds: float = 240) -> None:
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until:
                everything = [self.logs(f"{self.project}-superlink-1")]
                everything += [self.logs(self.container(name)) for name in SITES]
                everything += [self.logs(self.apps_container(name)) for name in SITES]
                raise AssertionError(f"{what}: not within {seconds} s\n" + "\n---\n".join(everything)[-9000:])
            time.sleep(1)

    def wait_for_run(self, name: str) -> str:
        from perennial.deploy.control import list_runs
        from perennial.deploy.federation import OperatorFolder
        from perennial.deploy.operations import last_run

        operator = OperatorFolder(self.operator)
        last = last_run(operator, name)
        self.wait(lambda: list_runs(operator)[last].over, f"run {name}", 420)
        return list_runs(operator)[last].status

    def down(self) -> None:
        for folder in (*(self.folder / name for name in self.networks), self.operator):
            if (folder / "compose.yaml").exists():
                run("docker", "compose", "down", "--volumes", "--timeout", "3", cwd=folder, fails=None)
        for network in self.networks.values():
            run("docker", "network", "rm", network, fails=None)


@pytest.fixture(scope="module")
def federation() -> Iterator[Federation]:
    folder = Path(tempfile.mkdtemp(prefix="perennial-"))
    folder.chmod(0o755)
    made = Federation(folder)
    try:
        digit_folders(folder / "data", [*SITES, "stranger"], 150)
        made.up_operator()
        for name in SITES:
            made.make_site(name)
        yield made
    finally:
        made.down()
        run("chmod", "-R", "u+w", folder, fails=None)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_run_with_a_site_cut_off_gives_the_result_of_the_in_process_engine(federation: Federation) -> None:
    experiment = federation.folder / "experiment.yaml"
    experiment.write_text(yaml.safe_dump(EXPERIMENT))
    federation.approve(federation.deploy("stage", experiment))
    for name in SITES:
        federation.compose_up(federation.folder / name)
    federation.deploy("submit", experiment)

    def rounds() -> int:
        return sum(event["event"] == "round" for event in federation.events("hospitals"))

    federation.wait(lambda: rounds() >= 1, "the first round", 420)
    cut = ("network", "disconnect", federation.networks["linz"], federation.container("linz"))
    run("docker", *cut)
    time.sleep(20)
    run("docker", "network", "connect", federation.networks["linz"], federation.container("linz"))
    assert federation.wait_for_run("hospitals") == "finished:completed"
    path = federation.operator / "state" / "runs" / "hospitals" / "summary.json"
    there = json.loads(path.read_text())
    data = {**EXPERIMENT["data"], "path": str(federation.folder / "data"), "partition": {"kind": "natural"}}
    shutil.rmtree(federation.folder / "data" / "stranger")
    simulated = federation.folder / "simulated.yaml"
    simulated.write_text(yaml.safe_dump({**EXPERIMENT, "data": data}))
    with split_key_of(path.parent):
        here = run_in_process(RunSettings(str(simulated), runs=str(federation.folder / "here")))
    assert extract_hashes(there) == extract_hashes(here)
    for name in SITES:
        ledger = (federation.folder / name / "state" / "ledger.jsonl").read_text().splitlines()
        kinds = [json.loads(line)["kind"] for line in ledger]
        assert kinds.count("update") == there["rounds"], "every release of a site is in its ledger"
        # of each task: counts, and the temperature that validation samples choose
        assert kinds.count("evaluation") == 2 * len(there["tasks"])
    assert "hospitals" in run("curl", "--silent", f"http://127.0.0.1:{federation.pages}/")


def test_containers_are_closed(federation: Federation) -> None:
    graz = federation.container("graz")
    assert "uid=0" not in run("docker", "exec", graz, "id")
    assert "Read-only" in run("docker", "exec", graz, "touch", "/opt/x", fails=True)
    assert "Read-only" in run("docker", "exec", graz, "touch", "/site/site.yaml", fails=True)
    assert run("docker", "port", graz).strip() == "", "a site listens to the outside"
    probe = "import socket; socket.create_connection(('superlink', {}), timeout=3)"
    run("docker", "exec", graz, "python", "-c", probe.format(9092))
    run("docker", "exec", graz, "python", "-c", probe.format(8000), fails=True)
    installed = run("docker", "exec", graz, "pip", "list", "--format", "freeze")
    listed = json.loads(run("docker", "exec", graz, "cat", "/opt/perennial/sbom.json"))
    components = {f"{part['name'].lower()}=={part['version']}" for part in listed["components"]}
    # pip comes from the base image and its name for a package may be spelled another way
    spelled = {line.lower().replace("_", "-") for line in installed.splitlines()}
    assert {name.replace("_", "-") for name in components} == spelled


def test_what_runs_apps_has_neither_keys_nor_a_network(federation: Federation) -> None:
    graz, operator = federation.apps_container("graz"), f"{federation.project}-superexec-serverapp-1"
    assert "uid=0" not in run("docker", "exec", graz, "id")
    assert run("docker", "exec", graz, "cat", "/site/node.key") == ""
    assert run("docker", "exec", operator, "ls", "/operator/certificates").split() == ["ca.crt"]
    for container in (graz, operator):
        devices = run("docker", "exec", container, "cat", "/proc/net/dev").splitlines()[2:]
        assert [line.split(":")[0].strip() for line in devices] == ["lo"]
        assert "Read-only" in run("docker", "exec", container, "touch", "/opt/x", fails=True)
    # and the one with the key and a way out has no data
    assert run("docker", "exec", federation.container("graz"), "ls", "-A", "/site/data") == ""
    assert run("docker", "exec", graz, "ls", "-A", "/site/data") != ""


def test_a_killed_container_of_apps_starts_again_with_its_supernode(federation: Federation) -> None:
    graz, supernode = federation.apps_container("graz"), federation.container("graz")
    run("docker", "kill", "--signal", "KILL", graz)
    federation.wait(lambda: "the other container ended" in federation.logs(supernode), "the end of both", 60)
    run("docker", "start", graz)  # what an operator kills, the engine does not start again

    def serves() -> bool:
        return run("docker", "exec", graz, "perennial", "site", "health", "/site/site.yaml", fails=None) == ""

    federation.wait(serves, "the SuperNode behind the socket", 120)


def test_what_is_in_an_image_is_what_the_list_of_hashes_names(federation: Federation) -> None:
    installed = run("docker", "exec", federation.container("graz"), "pip", "list", "--format", "freeze")
    kind = "cpu" if "+cpu" in installed else "cuda"
    listed = (ROOT / "docker" / "hashes" / f"site-{kind}.txt").read_text()
    named = {line.split()[0].replace("_", "-") for line in listed.splitlines() if "==" in line}
    found = {line.lower().replace("_", "-") for line in installed.splitlines()}
    assert {line for line in found - named if line.split("==")[0] not in ("perennial-fl", "pip")} == set()


def test_an_app_that_was_not_approved_is_refused(federation: Federation) -> None:
    experiment = federation.folder / "unapproved.yaml"
    changed = {**EXPERIMENT, "name": "unapproved", "rounds": {"wait_for": 2, "deadline": 15}}
    experiment.write_text(yaml.safe_dump(changed))
    federation.deploy("submit", experiment)
    assert federation.wait_for_run("unapproved") == "finished:failed"
    assert "has not approved the app of this run" in federation.deploy("logs", "unapproved")


def test_a_wrong_authority_a_stranger_and_a_revoked_site_are_refused(federation: Federation) -> None:
    stranger = federation.make_site("stranger")
    other = federation.folder / "other"
    federation.perennial("deploy", "init", other, "--host", "superlink")
    right = (stranger / "ca.crt").read_bytes()
    (stranger / "ca.crt").write_bytes((other / "certificates" / "ca.crt").read_bytes())
    check = ("docker", "compose", "run", "--rm", "--no-deps", "-T", "supernode", "check", "/site/site.yaml")
    assert "not signed by the authority" in run(*check, cwd=stranger, fails=True)
    (stranger / "ca.crt").write_bytes(right)
    # a key that the operator never saw, in the folder of a site that it let in
    unseen = federation.folder / "unseen"
    federation.perennial("site", "open", "--folder", unseen)
    (stranger / "node.key").write_bytes((unseen / "node.key").read_bytes())
    assert "is not registered at the SuperLink" in run(*check, cwd=stranger, fails=True)
    federation.compose_up(stranger)
    refused = federation.container("stranger")
    federation.wait(lambda: "is not registered" in federation.logs(refused), "the stranger's refusal", 90)
    federation.deploy("revoke", "linz")
    revoked = federation.container("linz")
    run("docker", "restart", "--time", "3", revoked)
    federation.wait(lambda: "has revoked" in federation.logs(revoked), "the refusal of linz", 90)
