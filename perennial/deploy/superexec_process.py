"""`python -m perennial.deploy.superexec_process`: Flower's SuperExec, which starts apps in our ways.

Flower 1.39 starts the program `flwr-clientapp` for each message, which imports PyTorch anew. Here a fork
server (deploy/fork_server.py) starts it, and our SuperNode wakes this process when a message has come,
instead of being asked for one every second. deploy/serverapp_process.py starts ServerApps. It takes the
options of `flower-superexec`, and serves Flower's own SuperNode and SuperLink too (`--isolation process`).
"""

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from perennial.deploy import fork_server
from perennial.deploy.child_watch import watch
from perennial.deploy.flower_seam import (
    LaunchResult,
    TaskType,
    flower_superexec,
    give_own,
    plain_logs,
    run_superexec,
    subprocess_executor,
)

WAKE = "PERENNIAL_WAKE"
"""Environment variable: the descriptor of the pipe in which our SuperNode puts a byte for each message."""
KILLED = "PERENNIAL_KILLED"
"""Environment variable: the descriptor of the pipe by which our SuperNode hears of ClientApps that were
killed."""


@cache
def start_fork_server(apps: Path, killed: int) -> socket.socket:
    """Start the fork server (once a process) and return the socket that takes its requests.

    apps: folder of unpacked apps. killed: as in ForkServer. This process ends when the server has ended, or
    was stopped for STOPPED_FOR seconds.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # -P: the folder of the script is no place for the app's imports
    command = [sys.executable, "-P", fork_server.__file__, str(theirs.fileno()), str(apps), str(killed)]
    with theirs:
        server = subprocess.Popen(command, pass_fds=[theirs.fileno(), *([killed] if killed >= 0 else [])])
    threading.Thread(target=watch, args=(server, "the fork server"), daemon=True).start()
    return ours


def launch_by_forking(channel: Callable[[], socket.socket]) -> None:
    """Let the SuperExec of this process send every ClientApp's start to a fork server.

    channel: gives the socket of start_fork_server(). Nothing is installed for an app at run time, whatever
    the SuperNode was started with.
    """
    launch = subprocess_executor.SubprocessExecutor.launch

    def launch_clientapp(self: Any, spec: Any) -> Any:
        if spec.task_type != TaskType.CLIENT_APP:
            return launch(self, spec)
        fields = ("runtime_api_address", "token", "insecure", "parent_pid")
        request = {name: getattr(spec, name) for name in fields}
        request |= {"root_certificates": spec.root_certificates_path, "bundle": spec.fab_hash}
        request["runtime_dependency_install"] = False
        channel().send(json.dumps(request).encode())
        return LaunchResult.accepted()

    subprocess_executor.SubprocessExecutor.launch = launch_clientapp


def sleep_until_woken(descriptor: int) -> None:
    """Let the SuperExec of this process look for a message as soon as the SuperNode writes a byte."""

    def sleep(seconds: float) -> None:
        if select.select([descriptor], [], [], seconds)[0] and not os.read(descriptor, 4096):
            time.sleep(seconds)

    give_own(run_superexec, "time", sleep=sleep)


def start_serverapps_by_script() -> None:
    """Let the SuperExec of this process start deploy/serverapp_process.py in place of `flwr-serverapp`."""
    instead = [sys.executable, "-P", str(Path(__file__).with_name("serverapp_process.py"))]

    def start(arguments: list[str], **settings: Any) -> Any:
        program = instead if arguments[0] == "flwr-serverapp" else arguments[:1]
        return subprocess.Popen([*program, *arguments[1:]], **settings)

    give_own(subprocess_executor, "subprocess", Popen=start)


if __name__ == "__main__":
    plain_logs()
    home = Path(os.environ.get("FLWR_HOME", "~/.flwr")).expanduser()
    server = partial(start_fork_server, home / "apps", int(os.environ.get(KILLED, "-1")))
    launch_by_forking(server)
    start_serverapps_by_script()
    if WAKE in os.environ:
        server()  # ahead of the first message
        sleep_until_woken(int(os.environ[WAKE]))
    flower_superexec()
