"""A Flower process ends when the SuperExec that it started has died or was stopped."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perennial.deploy.child_watch import ENDED

PARENT = """
import sys, time, types
from perennial.deploy import child_watch
child_watch.POLL, child_watch.STOPPED_FOR = 0.05, 0.3
flower = types.ModuleType("flower")
exec("import subprocess\\ndef start(*command): return subprocess.Popen(command)", flower.__dict__)
child_watch.end_with_child(flower, "superexec")
print(flower.start(sys.argv[1], "60").pid, flush=True)
print(flower.start("/bin/true").wait(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def parent(tmp_path: Path) -> "subprocess.Popen[str]":
    program = tmp_path / "superexec"
    program.symlink_to("/bin/sleep")
    command = [sys.executable, "-c", PARENT, str(program)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def child_of(parent: "subprocess.Popen[str]") -> int:
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert parent.stdout.readline().strip() == "0", "another child may end as it likes"
    return child


def test_a_killed_child_ends_its_parent_which_says_why(parent: "subprocess.Popen[str]") -> None:
    os.kill(child_of(parent), signal.SIGKILL)
    _, said = parent.communicate(timeout=30)
    assert parent.returncode == ENDED
    assert "superexec" in said and "ended with status -9" in said


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="stopped processes are seen by /proc")
def test_a_stopped_child_ends_its_parent_and_is_ended_itself(parent: "subprocess.Popen[str]") -> None:
    child = child_of(parent)
    os.kill(child, signal.SIGSTOP)
    _, said = parent.communicate(timeout=30)
    assert parent.returncode == ENDED and "was stopped for" in said
    until = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()
