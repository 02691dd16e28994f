"""Flower's own simulation runtime on loopback, with which we compare our engine: `flwr run`, nothing shared.

A SuperLink of its own in simulation mode, with a FLWR_HOME of its own, uses the packages of this environment.
The one that `flwr run` starts by itself installs the app's dependencies anew before every run.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.processes import BYTECODE

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
LOOPBACK = "127.0.0.1"
START_LIMIT = 60.0
"""Seconds that the SuperLink has to listen."""


@dataclass(frozen=True)
class FlwrRun:
    """One `flwr run`, start to exit. output: everything that it printed."""

    seconds: float
    output: str


class FlowerSimulation:
    """A SuperLink in simulation mode; every process ends with the block.

    folder: a new folder for its state and its log.
    app: what `flwr run` takes.
    binaries: the folder of the commands of Flower, which the environment's Python runs.
    beside: the working folder of every process.
    """

    def __init__(
        self, folder: Path, app: Path = ROOT, binaries: Path = BIN, beside: Path | None = None
    ) -> None:
        self.folder, self.app, self.beside = folder, app, beside or folder
        self.port, fleet = _free_port(), _free_port()
        self._fleet = f"{LOOPBACK}:{fleet}"
        self._process: subprocess.Popen[bytes] | None = None
        self.environment = {
            **os.environ,
            **BYTECODE,
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            # a cluster of its own: Ray would join the latest one that runs on this machine
            "RAY_ADDRESS": "local",
            "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        }

    def __enter__(self) -> Self:
        """Raises RuntimeError with the log when the SuperLink does not come up."""
        home = self.folder / "flwr"
        home.mkdir(parents=True)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n'
            f'[superlink.here]\naddress = "{LOOPBACK}:{self.port}"\ninsecure = true\n'
        )
        with open(self.folder / "superlink.log", "wb") as log:
            self._process = subprocess.Popen(
                [
                    *("flower-superlink", "--insecure", "--simulation"),
                    "--disable-runtime-dependency-installation",
                    *("--host", LOOPBACK, "--port", str(self.port), "--fleet-api-address", self._fleet),
                ],
                cwd=self.beside,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        end = time.monotonic() + START_LIMIT
        while not _listens(self.port):
            if time.monotonic() > end or self._process.poll() is not None:
                self.__exit__(None, None, None)
                raise RuntimeError(f"nothing listens on port {self.port}: {self.log()}")
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        # Flower and Ray give their processes sessions of their own, which outlive a run that was cut short
        for process in _processes_with(f"FLWR_HOME={self.environment['FLWR_HOME']}"):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def run(self, sites: int, run_config: dict[str, str], limit: float = 300) -> FlwrRun:
        """`flwr run` of the app on simulated sites, to its end.

        run_config: replaces values of pyproject.toml's [tool.flwr.app.config]. limit: seconds.
        Raises RuntimeError with all output when the command fails.
        """
        pairs = " ".join(f'{key}="{value}"' for key, value in run_config.items())
        start = time.perf_counter()
        done = subprocess.run(
            [
                *("flwr", "run", str(self.app), "here", "--stream", "--run-config", pairs),
                *("--federation-config", f"num-supernodes={sites} client-resources-num-cpus=1"),
            ],
            cwd=self.beside,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        seconds = time.perf_counter() - start
        if done.returncode:
            raise RuntimeError(f"flwr run: {done.stdout}{done.stderr}{self.log()}")
        return FlwrRun(seconds, done.stdout + done.stderr)

    def log(self) -> str:
        """The end of the SuperLink's log."""
        return (self.folder / "superlink.log").read_text()[-4000:]


def _processes_with(variable: str) -> list[int]:
    """Processes of this user that were started with this environment variable, as Linux says; else none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if variable.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _free_port() -> int:
    with socket.socket() as one:
        one.bind((LOOPBACK, 0))
        return one.getsockname()[1]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0
