"""A federation of real processes on loopback, made by the commands of operators and hospitals.

As root, sites run without the capability to write where permissions forbid it, so that the read-only apps
folder binds them as it binds a hospital's.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import yaml
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
LOOPBACK = "127.0.0.1"
ENTERED = "SuperNode ID"
"""What a SuperNode says once the SuperLink has let it in."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, each with the next one free too."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as one, socket.socket() as following:
            one.bind((LOOPBACK, 0))
            port = one.getsockname()[1]
            try:
                following.bind((LOOPBACK, port + 1))
            except OSError:
                continue
            if not any(abs(port - other) < 2 for other in found):
                found.append(port)
    return found


def digit_folders(root: Path, sites: list[str], per_site: int) -> None:
    """root/SITE/CLASS/NUMBER.png: scikit-learn's digits, a different part for each site."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 8, 8) * 15).astype(np.uint8)
    for position, site in enumerate(sites):
        for index in range(position * per_site, (position + 1) * per_site):
            folder = root / site / f"digit-{labels[index]}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[index]).save(folder / f"{index:04}.png")


def bound_by_permissions() -> list[str] | None:
    """What to put before a command so that read-only folders bind it; None: root, and no way to bind it."""
    if os.getuid():
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return None
    return [setpriv, "--inh-caps=-dac_override", "--bounding-set=-dac_override", "--"]


class Deployment:
    """A federation and its processes; all end with the block, and the folder goes. sites: their names."""

    def __init__(self, sites: list[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="perennial-"))
        self.folder.chmod(0o755)
        self.operator = self.folder / "federation"
        prefix = bound_by_permissions()
        self.pinned = prefix is not None
        self._prefix = prefix or []
        self.names = sites
        self.fleet, self.control, self.pages, *ports = free_ports(3 + len(sites))
        self.ports = dict(zip(sites, ports, strict=True))
        self.environment: dict[str, dict[str, str]] = {}
        """Variables beside this process's own, by the name of a process."""
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in list(self._processes):
            self.kill(name)
        subprocess.run(["chmod", "-R", "u+w", str(self.folder)], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def perennial(self, *arguments: str | Path, fails: bool = False) -> str:
        """One command; what it said. Raises AssertionError when it fails, or does not where fails is set."""
        # what a site's own user may write decides what `check` says
        prefix = self._prefix if arguments[:2] == ("site", "check") else []
        command = [
            *prefix,
            sys.executable,
            "-m",
            "perennial.cli.main",
            *(str(argument) for argument in arguments),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        said = done.stderr + done.stdout  # what a command prints comes last
        assert (done.returncode != 0) == fails, f"{arguments}: {done.returncode}: {said}{self.logs()}"
        return said

    def deploy(self, command: str, *arguments: str | Path, fails: bool = False) -> str:
        """One operator's command on this federation."""
        return self.perennial("deploy", command, *arguments, "--folder", self.operator, fails=fails)

    def init(self, host: str = "localhost") -> None:
        """The federation's folder, without containers, on free ports."""
        self.perennial(
            *("deploy", "init", self.operator, "--host", host, "--runtime", "process"),
            *("--fleet-port", str(self.fleet), "--control-port", str(self.control)),
        )
        path = self.operator / "deploy.yaml"
        settings = yaml.safe_load(path.read_text())
        path.write_text(yaml.safe_dump({**settings, "fleet_host": LOOPBACK}))

    @property
    def run_folder(self) -> Path:
        """Where the server keeps a run that is called `hospitals`."""
        return self.operator / "state" / "runs" / "hospitals"

    def submit(self) -> None:
        """Submit the experiment that lies in the federation's folder."""
        self.deploy("submit", self.folder / "experiment.yaml")

    def site_file(self, name: str) -> Path:
        return self.folder / name / "site.yaml"

    def edit_site(self, name: str, **sections: Any) -> None:
        """Change sections of a site.yaml as its engineer would."""
        path = self.site_file(name)
        content = yaml.safe_load(path.read_text())
        for section, change in sections.items():
            merge = isinstance(change, dict) and isinstance(content.get(section), dict)
            content[section] = {**content[section], **change} if merge else change
        path.write_text(yaml.safe_dump(content))

    def open_site(self, name: str) -> None:
        """The policy of a site that trusts its operator: what the template ships refuses plain training."""
        answers = ["train", "evaluate", "digest", "sparsity"]
        trusting = {"answers": answers, "min_samples": 1, "require_privacy": "none", "max_epsilon": None}
        self.edit_site(name, policy=trusting)

    def prepare(self, experiment: Path, edit: Callable[[str], dict[str, Any]]) -> None:
        """After init(): the SuperLink serves, and every site is registered and has approved the experiment.

        edit: sections of a site's site.yaml by its name, asked for once every site's folder is there.
        """
        self.start_superlink()
        fab, digest = self.deploy("stage", experiment).split()[-2:]
        for name in self.names:
            self.make_site(name)
        for name in self.names:
            self.edit_site(name, **edit(name))
            self.perennial("site", "approve", fab, digest, "--site", self.site_file(name))

    def start_sites(self, seconds: float = 240) -> None:
        """Start every site, and wait until the SuperLink has let them all in."""
        for name in self.names:
            self.start_site(name)
        for name in self.names:
            self.wait_for_log(name, ENTERED, seconds)

    def start_pages(self) -> str:
        """Start the operator's pages and wait until they answer; their address."""
        runs = self.operator / "state" / "runs"
        self._start("pages", [], "serve", str(runs), "--port", str(self.pages))
        self._wait_for_ports("pages", self.pages)
        return f"http://{LOOPBACK}:{self.pages}"

    def start_superlink(self) -> None:
        """Start it and wait until it serves."""
        self._start("superlink", [], "deploy", "start", str(self.operator))
        self._wait_for_ports("superlink", self.control, self.fleet)

    def start_site(self, name: str) -> None:
        self._start(name, self._prefix, "site", "start", str(self.site_file(name)))

    def restart_site(self, name: str, seconds: float = 180) -> None:
        """Kill a site and start it again, ten seconds after each time it ended, until it is connected.

        That is what a service manager does. The SuperLink admits nobody whom it believes to be connected, and
        it takes two missed heartbeats to doubt that.
        """
        before = self.log(name).count(ENTERED)
        until = time.monotonic() + seconds
        if name in self._processes:
            self.kill(name)
        self.start_site(name)
        while self.log(name).count(ENTERED) == before:
            assert time.monotonic() < until, f"{name} is not let in: {self.logs()}"
            if not self.running(name):
                time.sleep(10)
                # what it started has outlived it
                self.kill(name)
                self.start_site(name)
            time.sleep(0.2)

    def make_site(self, name: str) -> None:
        """A hospital's folder: its own key, let in at the operator, its bundle opened."""
        own = self.folder / name
        own.mkdir(exist_ok=True)
        self.perennial("site", "open", "--folder", own)
        self.deploy("add-site", name, own / "node.key.pub")
        self.perennial("site", "open", self.operator / "bundles" / f"{name}.tar.gz", "--folder", own)
        self.edit_site(name, connection={"runtime_port": self.ports[name]})
        self.open_site(name)

    def processes(self) -> list[str]:
        """Names of all long-lived processes."""
        return list(self._processes)

    def process_id(self, name: str) -> int:
        """Of a long-lived process; it leads a session of its own."""
        return self._processes[name].pid

    def running(self, name: str) -> bool:
        return self._processes[name].poll() is None

    def wait_for_end(self, name: str, seconds: float = 300) -> int:
        """The exit status of a process that is expected to end."""
        return self._processes[name].wait(timeout=seconds)

    def kill(self, name: str) -> None:
        """SIGKILL to a process and its children."""
        process = self._processes.pop(name)
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        process.wait()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def logs(self) -> str:
        """The end of every process's log."""
        return "".join(f"\n--- {path.name}\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log"))

    def wait_for_log(self, name: str, text: str, seconds: float = 60) -> None:
        until = time.monotonic() + seconds
        while text not in self.log(name):
            assert time.monotonic() < until, f"{name} never said {text!r}: {self.logs()}"
            time.sleep(0.2)

    def wait_for_run(self, name: str, seconds: float = 240) -> str:
        """Flower's final status of a run."""
        from perennial.deploy.control import list_runs
        from perennial.deploy.federation import OperatorFolder
        from perennial.deploy.operations import last_run

        operator = OperatorFolder(self.operator)
        until, status = time.monotonic() + seconds, "unknown"
        while time.monotonic() < until:
            status = list_runs(operator)[last_run(operator, name)].status
            if status.startswith("finished"):
                return status
            time.sleep(1)
        raise AssertionError(f"run {name} is still {status}: {self.logs()}")

    def _start(self, name: str, prefix: list[str], *arguments: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(
                [*prefix, sys.executable, "-m", "perennial.cli.main", *arguments],
                cwd=self.folder,
                env=os.environ | {"PYTHONPATH": str(ROOT)} | self.environment.get(name, {}),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait_for_ports(self, name: str, *ports: int, seconds: float = 180) -> None:
        until = time.monotonic() + seconds
        while not all(map(self._listens, ports)):
            assert self.running(name) and time.monotonic() < until, f"{name} does not listen: {self.logs()}"
            time.sleep(0.25)

    @staticmethod
    def _listens(port: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((LOOPBACK, port)) == 0


class QuickDeployment(Deployment):
    """A federation whose commands run in this process, because starting a hundred takes minutes."""

    def perennial(self, *arguments: str | Path, fails: bool = False) -> str:
        """One command; what it said. Raises AssertionError when it fails, or does not where fails is set."""
        from typer.testing import CliRunner

        from perennial.cli.main import app

        # what a command makes at a relative path must not stay in the checkout
        with contextlib.chdir(self.folder):
            done = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert (done.exit_code != 0) == fails, f"{arguments}: {done.output}{done.exception}{self.logs()}"
        return done.output
