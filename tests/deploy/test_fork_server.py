"""A site's fork server: a process a message, with the approved app's code and nothing of other messages."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perennial.deploy import fork_server

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes by /proc")
BUNDLE = "abcdef12" + 56 * "0"
# in the place of Flower: writes down what a ClientApp would find in its process
SEAM = """
import json, os, random, sys, types
import numpy

def run_clientapp(token, certificates, **task):
    if token == "to be killed":
        os.kill(os.getpid(), 9)
    import perennial.client.app as app
    app.messages += 1
    found = dict(
        process=os.getpid(), parent=os.getppid(), code=app.CODE, messages=app.messages, prepared=app.prepared,
        draws=[random.random(), float(numpy.random.random())], name=open("/proc/self/comm").read().strip(),
        command=open("/proc/self/cmdline").read(), file=sys.modules["perennial"].__file__, task=task,
    )
    with open(token + ".part", "w") as file:
        json.dump(found, file)
    os.rename(token + ".part", token)

plain_logs = int
run_clientapp_module = types.SimpleNamespace(
    run_clientapp=run_clientapp, install_from_fab=print, pull_and_inflate_object_from_tree=print
)
"""
APP = """
CODE, messages, prepared = {code!r}, 0, None

def prepare(config):
    global prepared
    prepared = config
"""
PROJECT = """
[tool.flwr.app.components]
clientapp = "perennial.client.app:app"
[tool.flwr.app.config]
experiment = "one.yaml"
"""


def write_app(apps: Path, code: str) -> Path:
    folder = apps / f"hospital.app.1.0.{BUNDLE[:8]}"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "perennial" / "client").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "perennial" / "__init__.py").touch()
    (folder / "perennial" / "client" / "app.py").write_text(APP.format(code=code))
    return folder


class Server:
    """A running fork server. ask: sends a message, and gives what its process found."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.apps, self._asked = folder, folder / "apps", 0
        script = shutil.copy(fork_server.__file__, folder)
        (folder / "flower_seam.py").write_text(SEAM)
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.killed, killed = os.pipe()
        with theirs:
            command = [sys.executable, "-P", script, str(theirs.fileno()), str(self.apps), str(killed)]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno(), killed])
        os.close(killed)

    def ask(self, bundle: str | None = BUNDLE) -> dict[str, Any]:
        self._asked += 1
        answer = self.folder / f"secret-token-{self._asked}"
        request = {"token": str(answer), "bundle": bundle, "root_certificates": None, "parent_pid": 7}
        self.channel.send(json.dumps(request).encode())
        wait_until(answer.exists)
        return json.loads(answer.read_text())


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    write_app(tmp_path / "apps", "approved")
    server = Server(tmp_path)
    yield server
    server.channel.close()
    assert server.process.wait(timeout=30) == 0


def test_the_token_of_a_killed_process_is_told_and_of_no_other(server: Server) -> None:
    server.ask()
    asked = {"token": "to be killed", "bundle": BUNDLE, "root_certificates": None, "parent_pid": 7}
    server.channel.send(json.dumps(asked).encode())
    with os.fdopen(server.killed) as told:
        assert told.readline() == "to be killed\n"


def test_each_message_has_a_process_of_its_own_with_the_code_of_the_bundle(server: Server) -> None:
    first, second = server.ask(), server.ask()
    assert first["process"] != second["process"] and first["parent"] == second["parent"]
    assert first["code"] == "approved" and first["prepared"] == {"experiment": "one.yaml"}
    assert first["file"].startswith(str(server.apps)), "the installed code must not stand in for the app's"
    assert second["messages"] == 1, "a message finds nothing of the one before"
    assert not set(first["draws"]) & set(second["draws"])
    assert first["name"] == "flwr-clientapp" and "secret-token" not in first["command"]
    assert first["task"] == {"parent_pid": 7}


def test_an_app_that_was_unpacked_anew_is_imported_anew(server: Server) -> None:
    before = server.ask()
    write_app(server.apps, "another")
    after = server.ask()
    assert (before["code"], after["code"]) == ("approved", "another")


def test_a_killed_app_server_is_replaced(server: Server) -> None:
    before = server.ask()
    os.kill(before["parent"], signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{before['parent']}").exists())
    assert server.ask()["parent"] != before["parent"]


def test_nothing_outlives_the_one_that_asks(server: Server) -> None:
    parent = server.ask()["parent"]
    server.channel.close()
    server.process.wait(timeout=30)
    wait_until(lambda: not Path(f"/proc/{parent}").exists())


def test_an_app_that_cannot_be_imported_leaves_the_error_to_the_message(server: Server) -> None:
    folder = write_app(server.apps, "approved")
    (folder / "perennial" / "client" / "app.py").write_text("raise ImportError('on purpose')")
    request = {"token": str(server.folder / "never"), "bundle": BUNDLE, "root_certificates": None}
    server.channel.send(json.dumps(request).encode())
    write_app(server.apps, "mended")
    assert server.ask()["code"] == "mended"


def test_a_bundle_that_is_not_unpacked_is_left_to_flower(server: Server) -> None:
    stranger = server.ask()["parent"]
    request = {"token": str(server.folder / "never"), "bundle": 64 * "9", "root_certificates": None}
    server.channel.send(json.dumps(request).encode())
    again = server.ask()
    assert again["parent"] == stranger and not (server.folder / "never").exists()


LEAVING = """
import atexit, os, sys
from pathlib import Path
from perennial.deploy.fork_server import leave_after

class Left:
    def __del__(self):
        Path("left").write_text("taken apart")

def work():
    globals()["left"] = Left()
    atexit.register(Path("exit").write_text, "called")
    print("said", end="")
    {ending}

if not (process := os.fork()):
    leave_after(work)
print(" status", os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
"""


@pytest.mark.parametrize(
    ("ending", "status"),
    [("pass", 0), ("sys.exit()", 0), ("sys.exit(3)", 3), ("sys.exit('a sentence')", 1), ("1 / 0", 1)],
)
def test_a_forked_process_ends_without_taking_the_interpreter_apart(
    tmp_path: Path, ending: str, status: int
) -> None:
    command = [sys.executable, "-c", LEAVING.format(ending=ending)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"said status {status}\n"
    assert ("ZeroDivisionError" in done.stderr) == ("/" in ending)
    assert (tmp_path / "exit").exists() and not (tmp_path / "left").exists()
