"""Processes that belong together end together, say why, and never with status 0 unless they were asked to."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PARENT = """
import logging, os, sys
from perennial.deploy.processes import run_supervised
logging.basicConfig(format="%(message)s")
code = sys.argv[1]
long = [sys.executable, "-c", "import os, sys, time; print(os.getpid(), flush=True); time.sleep(60)"]
commands = {"other": long, "the SuperNode": [sys.executable, "-c", code]}
status = run_supervised(commands, {}, lambda: "the key is revoked", read=lambda line: b"deaf" in line)
os._exit(status)
"""


@pytest.fixture
def start() -> Iterator[object]:
    started: list[subprocess.Popen[str]] = []

    def begin(code: str) -> tuple[subprocess.Popen[str], int]:
        command = [sys.executable, "-c", PARENT, code]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        # the two children write in any order
        words = (line.split()[-1] for line in process.stdout)
        return process, int(next(word for word in words if word.isdigit()))

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def gone(process: int) -> bool:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        status = Path(f"/proc/{process}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_a_process_that_ends_gracefully_unasked_ends_all_with_a_reason(start) -> None:  # type: ignore[no-untyped-def]
    parent, other = start("import time; time.sleep(0.5)")
    assert parent.wait(30) == 70 and gone(other)
    assert "the SuperNode ended with status 0: the key is revoked" in parent.communicate()[1]


def test_a_process_that_lives_on_and_works_no_more_ends_all(start) -> None:  # type: ignore[no-untyped-def]
    parent, other = start("import time; time.sleep(2); print('deaf', flush=True); time.sleep(60)")
    assert parent.wait(30) == 70 and gone(other)


def test_whoever_asks_gets_status_0(start) -> None:  # type: ignore[no-untyped-def]
    parent, other = start("import time; time.sleep(60)")
    time.sleep(0.5)
    parent.terminate()
    assert parent.wait(30) == 0 and gone(other)


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is told by Linux alone")
def test_a_killed_parent_leaves_nothing(start) -> None:  # type: ignore[no-untyped-def]
    parent, other = start("import time; time.sleep(60)")
    time.sleep(0.5)
    os.kill(parent.pid, signal.SIGKILL)
    assert gone(other)
