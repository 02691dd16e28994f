"""Whole processes, measured from outside: wall time, processor time, largest memory."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BYTECODE = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(ROOT / "build" / "bytecode")}
"""The environment of a process that is timed: Python keeps its bytecode, as in any installation, even if the
person who measures has switched that off."""


@dataclass(frozen=True)
class Ended:
    """One process from start to exit. peak_kib: resident memory of the process or its largest child."""

    seconds: float
    cpu_seconds: float
    peak_kib: int
    output: str

    @property
    def found(self) -> dict[str, Any]:
        """The JSON object on the last line of the output."""
        return json.loads(self.output.strip().splitlines()[-1])


def measured(*arguments: str) -> Ended:
    """Run `python ARGUMENTS...` from the repository's root with one thread.

    Raises RuntimeError when it fails.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | BYTECODE | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"python {' '.join(arguments)}: exit code {process.returncode}: {output[-2000:]}")
    return Ended(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss, output)


def family(root: int) -> dict[int, float]:
    """A process and all below it: seconds of processor time by process id.

    Children that have ended and were awaited count with their parent.
    """
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
                ticks = sum(map(int, fields[11:15]))
                seconds[int(entry.name)] = ticks / os.sysconf("SC_CLK_TCK")
    below = {root} & seconds.keys()
    while more := {process for process, parent in parents.items() if parent in below} - below:
        below |= more
    return {process: seconds[process] for process in below}


def in_turns(times: int, runs: Sequence[Callable[[], Ended]]) -> list[list[Ended]]:
    """times results of each run, taken A B, B A, A B ..., so that a drift of the machine meets all alike."""
    results: list[list[Ended]] = [[] for _ in runs]
    for turn in range(times):
        order = range(len(runs)) if turn % 2 == 0 else reversed(range(len(runs)))
        for place in order:
            results[place].append(runs[place]())
    return results
