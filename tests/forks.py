"""Runs a program in a process of its own that has imported everything already.

A fresh interpreter spends seconds on importing PyTorch and Flower. Here one server process imports them once
for all tests of a worker, trains nothing, and forks for each program; a program may kill itself.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Ended = subprocess.CompletedProcess[str]
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch", "flwr.app", "perennial.engine.run", "perennial.privacy.ledger"])


class Started:
    """A program that runs. Made by `started_code`."""

    def __init__(self, process: Any, folder: Path) -> None:
        self._process, self._folder = process, folder

    def read_lines(self) -> list[str]:
        """Whole lines that it has written so far."""
        out = self._folder / "out"
        return out.read_text().splitlines(keepends=False) if out.exists() else []

    def kill(self) -> None:
        """Kill it, and wait until it has ended."""
        self._process.kill()
        self._process.join()

    def wait(self, timeout: float) -> int:
        """Its exit status, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: It did not end; it has been killed.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.kill()
            raise subprocess.TimeoutExpired("run_code", timeout)
        return self._process.exitcode

    def read(self, name: str) -> str:
        """All that it wrote to `out` or to `errors`."""
        path = self._folder / name
        return path.read_text() if path.exists() else ""


@contextmanager
def started_code(code: str, *arguments: str, cwd: Path = ROOT) -> Iterator[Started]:
    """Start a program with arguments, as `python -c CODE ARGUMENTS...` would; it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="perennial-fork-") as folder:
        given = (code, arguments, str(cwd), dict(os.environ), folder)
        process = _SERVER.Process(target=_execute, args=given)
        process.start()
        started = Started(process, Path(folder))
        try:
            yield started
        finally:
            started.kill()


def run_code(code: str, *arguments: str, cwd: Path = ROOT, timeout: float = 120) -> Ended:
    """Run a program with arguments, as `python -c CODE ARGUMENTS...` would.

    Args:
        code: The program's text.
        arguments: Its `sys.argv[1:]`.
        cwd: Where it runs.
        timeout: Seconds.

    Returns:
        Its exit status, negative for a signal, and all that it wrote.

    Raises:
        subprocess.TimeoutExpired: It did not end; it has been killed.
    """
    with started_code(code, *arguments, cwd=cwd) as process:
        status = process.wait(timeout)
        return subprocess.CompletedProcess(["run_code"], status, process.read("out"), process.read("errors"))


def _execute(code: str, arguments: tuple[str, ...], cwd: str, variables: dict[str, str], folder: str) -> None:
    for name, descriptor in (("out", 1), ("errors", 2)):
        opened = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:] = [str(ROOT), *sys.path]
    sys.argv = ["-c", *arguments]
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - as long as the process
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    status = 0
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
