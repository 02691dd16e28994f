"""Long-lived processes that belong together: each ends with the others, and the log says why."""

import ctypes
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from types import FrameType

from perennial.deploy.app_container import Partner
from perennial.deploy.warm import RESTART, SOCKET, write_stand_ins
from perennial.foundation.errors import StateError
from perennial.foundation.files import make_folder, replace_file

log = logging.getLogger("perennial.deploy")
ENDED = 70
"""Exit status where a process ended by itself: 'internal software error' of sysexits.h."""
FLOWER = "1.42"
"""The version whose commands and HTTP interfaces are used here."""
MODULES = ("torch", "numpy", "yaml", "safetensors.torch", "httpcore")
"""What every warm process imports."""
LOOK = "0.05"
"""Seconds between two looks of a SuperExec for a task."""
EVERY = 5.0
POLL = 0.2
GRACE = 20.0
"""Seconds for processes to end after they were asked to."""
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux."""
_COLOUR = re.compile(rb"\x1b\[[0-9;]*m")
_TIMED = re.compile(rb"([A-Z]+ )?\d{4}-\d\d-\d\d")
_ANSWERED = re.compile(rb"(uvicorn\.access.* 2\d\d|ControlServicer\.ListRuns)\s*$")
"""Answered requests, and what the gateway asks every two seconds."""


def require_flower() -> None:
    """Raises StateError unless the installed Flower speaks as the gateway does."""
    found = version("flwr")
    if found.split(".")[:2] != FLOWER.split("."):
        raise StateError(
            f"flwr: found {found}, allowed {FLOWER}.x for `perennial deploy start` and `perennial site "
            "start`; Flower's own commands run with other versions (docs/stock_flower.md)"
        )


def find_program(name: str) -> str:
    """Path of a command of this environment."""
    return str(Path(sys.executable).with_name(name))


@dataclass(frozen=True)
class Runtime:
    """What Flower's processes of one side share.

    folder: private to the user, for sockets, stand-in and secret. home: Flower's. port: of the Runtime API on
    loopback. certificate: the options by which a client of that API trusts it.
    """

    folder: Path
    home: Path
    port: int
    certificate: tuple[str, ...]

    @property
    def secret(self) -> list[str]:
        """The options for the secret without which the Runtime API gives no task to anybody."""
        return ["--superexec-auth-secret-file", str(self.folder / "superexec.secret")]

    @property
    def environment(self) -> dict[str, str]:
        """Of all processes."""
        own = str(Path(sys.executable).parent)
        return os.environ | {
            "FLWR_HOME": str(self.home),
            # Flower would tell its makers of each start, and ask them whether there is a newer release
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": LOOK,
            SOCKET: str(self.folder / "warm"),
            # the stand-in first, then this environment's own programs
            "PATH": os.pathsep.join((str(self.folder / "bin"), own, os.environ.get("PATH", ""))),
        }

    def make_secret(self) -> None:
        """Draw the secret, anew at each start of the side that has the keys."""
        make_folder(self.folder)
        self.folder.chmod(0o700)
        replace_file(self.folder / "superexec.secret", secrets.token_bytes(32), mode=0o600)

    def app(self, script: str, *modules: str, approvals: Path | None = None) -> dict[str, list[str]]:
        """The processes that run apps.

        script: of the apps, such as flwr-clientapp. modules: imported ahead of messages; none may start a
        thread, which a fork would lack. approvals: of a site, whose apps are pinned.
        """
        write_stand_ins(self.folder / "bin", script)
        pinned = [] if approvals is None else ["--approvals", str(approvals.absolute())]
        warm = [sys.executable, "-m", "perennial.deploy.warm", *pinned, str(self.folder / "warm"), script]
        address = ("--runtime-api-address", f"127.0.0.1:{self.port}", *self.certificate)
        return {
            "the warm ServerApp" if "server" in script else "the warm ClientApp": [*warm, *MODULES, *modules],
            "the SuperExec": [*(find_program("flower-superexec"), *address), *self.secret],
        }


def run_supervised(
    commands: Mapping[str, Sequence[str]],
    environment: Mapping[str, str],
    explain: Callable[[], str],
    meanwhile: Callable[[], object] | None = None,
    read: Callable[[bytes], bool] = lambda line: False,
    partner: Partner | None = None,
) -> int:
    """Run processes until one of them, or the partner, ends or this one is asked to; then end them all.

    Args:
        commands: command line of each process by name, in the order in which they start.
        environment: of all of them.
        explain: called when one ended by itself; returns why, in a sentence for the log, or ''.
        meanwhile: called in a thread of its own, every EVERY seconds.
        read: called with each line that they write; whether the process that wrote it is to be killed.
        partner: the other half, where it is in a container of its own.

    Returns:
        The status for os._exit(), since a thread may wait: 0 after SIGTERM or SIGINT, else ENDED, although
        Flower's own processes end with 0 when they are shut out.
    """
    asked: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, stop)
    running = _start(commands, environment, read)
    if meanwhile is not None:

        def repeat() -> None:
            while True:
                meanwhile()
                time.sleep(EVERY)

        Thread(target=repeat, daemon=True).start()
    while True:
        ended = _find_first_ended(running, asked, partner)
        # a SuperNode in another container learns of it by the end of this one
        if asked or not ended or partner is not None or running[ended].returncode != RESTART:
            break
        log.error("%s ended because an app was killed; all of it starts again", ended)
        _end(running.values())
        running = _start(commands, environment, read)
    if ended and not asked:
        why = explain()
        log.error("%s ended with status %s%s", ended, running[ended].returncode, f": {why}" if why else "")
    elif not asked:
        log.error("the other container ended, so this one ends too; both start again")
    _end(running.values())
    logging.shutdown()
    return 0 if asked else ENDED


def _start(
    commands: Mapping[str, Sequence[str]], environment: Mapping[str, str], read: Callable[[bytes], bool]
) -> dict[str, "subprocess.Popen[bytes]"]:
    own, started = os.getpid(), {}
    for name, command in commands.items():
        started[name] = process = subprocess.Popen(
            command,
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # before the program runs, this takes no lock that a thread could hold
            preexec_fn=lambda: _end_with_parent(own),  # noqa: PLW1509
        )
        Thread(target=_copy, args=(process, read), daemon=True).start()
    return started


def _copy(process: "subprocess.Popen[bytes]", read: Callable[[bytes], bool]) -> None:
    """Write each line of a process to the log: with its time, without colours, but no answered request."""
    assert process.stdout is not None
    for line in process.stdout:
        plain = _COLOUR.sub(b"", line)
        if read(plain):
            process.kill()
        if not _ANSWERED.search(plain):
            now = b"" if _TIMED.match(plain) else time.strftime("%Y-%m-%d %H:%M:%S ").encode()
            sys.stdout.buffer.write(now + plain)
            sys.stdout.buffer.flush()


def _find_first_ended(
    running: Mapping[str, "subprocess.Popen[bytes]"], asked: list[int], partner: Partner | None
) -> str:
    """Name of the first process that ended; '' where all were asked to end before, or the partner has."""
    while not asked and (partner is None or not partner.gone):
        time.sleep(POLL)
        if ended := next((name for name, process in running.items() if process.poll() is not None), ""):
            time.sleep(2 * POLL)  # whoever stops a whole group asks all of it at once
            return ended
    return ""


def _end(processes: Iterable["subprocess.Popen[bytes]"]) -> None:
    found = [process for process in processes if process.poll() is None]
    for process in found:
        process.terminate()
    until = time.monotonic() + GRACE
    for process in found:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_with_parent(parent: int) -> None:
    """In a new process: end when the parent does, also when that is killed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(ENDED)
