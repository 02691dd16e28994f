"""A command of Flower runs in a fork of a warm process, and whoever is not its user gets nothing of it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.supercore.constant import TASK_TYPE_TO_COMMAND

from perennial.config.site import SiteConfig
from perennial.deploy import supernode
from perennial.deploy.processes import Runtime
from perennial.deploy.warm import RESTART, SCRIPTS, SOCKET, write_stand_ins
from tests.live_pages import until

SCRIPT = "flwr-clientapp"


@pytest.fixture
def warm(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "perennial.deploy.warm", str(tmp_path / "warm"), SCRIPT, "json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    until((tmp_path / "warm").exists, 120)
    write_stand_ins(tmp_path / "bin", SCRIPT)
    yield process
    process.kill()
    process.wait()


def call(folder: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    environment = os.environ | {
        SOCKET: str(folder / "warm"),
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
    }
    return subprocess.Popen(
        [SCRIPT, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_the_script_runs_with_the_callers_words_and_output(
    tmp_path: Path, warm: "subprocess.Popen[bytes]"
) -> None:
    said, _ = call(tmp_path, "--help").communicate(timeout=60)
    assert b"usage: flwr-clientapp" in said and b"--token" in said
    said, _ = call(tmp_path, "--nothing-of-that-name").communicate(timeout=60)
    assert b"usage" in said and warm.poll() is None, "a command that fails ends nothing else"
    assert (tmp_path / "warm").stat().st_mode & 0o777 == 0o600


def test_no_other_script_of_flower_runs_at_a_site(tmp_path: Path) -> None:
    """The SuperLink says which script a task is for; an agent's would unpack its app and run it."""
    assert set(TASK_TYPE_TO_COMMAND.values()) == set(SCRIPTS)
    write_stand_ins(tmp_path, SCRIPT)
    for name in set(SCRIPTS) - {SCRIPT}:
        ended = subprocess.run([tmp_path / name, "--insecure"], capture_output=True, check=False, timeout=60)
        assert ended.returncode == 1 and b"not run here" in ended.stderr


def test_a_killed_app_ends_the_warm_process_so_that_all_starts_again(
    tmp_path: Path, warm: "subprocess.Popen[bytes]"
) -> None:
    # it waits for a SuperNode that is not there
    call(tmp_path, "--insecure", "--token", "x", "--runtime-api-address", "127.0.0.1:9")
    children = Path(f"/proc/{warm.pid}/task/{warm.pid}/children")
    (child,) = until(lambda: children.read_text().split(), 60)
    os.kill(int(child), signal.SIGKILL)
    assert warm.wait(60) == RESTART


def test_a_request_without_streams_starts_nothing(tmp_path: Path, warm: "subprocess.Popen[bytes]") -> None:
    for data in (b"{}", b"", b"no JSON"):
        with socket.socket(socket.AF_UNIX) as there:
            there.connect(str(tmp_path / "warm"))
            there.send(data or b" ")
            there.settimeout(30)
            assert there.recv(1) == b""
    time.sleep(0.2)
    assert warm.poll() is None
    said, _ = call(tmp_path, "--help").communicate(timeout=60)
    assert b"usage" in said


def test_a_call_that_comes_while_modules_are_imported_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\nwhile not pathlib.Path(__file__).with_name('go').exists(): time.sleep(0.05)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    write_stand_ins(tmp_path / "bin", SCRIPT)
    command = [sys.executable, "-m", "perennial.deploy.warm", str(tmp_path / "warm"), SCRIPT, "slow"]
    with subprocess.Popen(command) as process:
        try:
            until((tmp_path / "warm").exists, 120)
            asked = call(tmp_path, "--help")
            with pytest.raises(subprocess.TimeoutExpired):
                asked.wait(1)
            (tmp_path / "go").touch()
            said, _ = asked.communicate(timeout=120)
        finally:
            process.kill()
    assert b"usage: flwr-clientapp" in said


@pytest.mark.parametrize(("demand", "is_loaded"), [("none", False), ("sample", True), ("patient", True)])
def test_opacus_is_imported_before_the_turns_of_a_site_that_demands_dp_sgd(
    tmp_path: Path, demand: str, is_loaded: bool
) -> None:
    policy = {"require_privacy": demand, "max_epsilon": None if demand == "none" else 8.0}
    config = SiteConfig.model_validate({"site": "graz", "state_dir": tmp_path, "policy": policy})
    (tmp_path / "process").mkdir()
    listed = supernode._list_apps(Runtime(tmp_path / "process", tmp_path, 9, ()), config)
    assert any("opacus.grad_sample" in command for command in listed.values()) == is_loaded
