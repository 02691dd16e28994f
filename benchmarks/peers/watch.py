"""Runs a command to its exit and measures the memory of all processes that it starts."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.processes import ROOT, Ended

PERIOD = 0.1
"""Seconds between two looks at the memory."""
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


class TreeMemory:
    """Largest memory of some processes and everything that descends from them, looked at ten times a second.

    Pages that several processes share, such as libraries, count once: the sum of what each has to itself,
    and the largest shared part. A process once seen stays watched when its parent ends before it.
    """

    def __init__(self, roots: Sequence[int]) -> None:
        self.peak_kib = 0
        self._known = set(roots)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "TreeMemory":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(PERIOD):
            self._known |= descendants(self._known)
            sizes = [size for size in map(resident_kib, sorted(self._known)) if size is not None]
            own, shared = sum(size[0] for size in sizes), max((size[1] for size in sizes), default=0)
            self.peak_kib = max(self.peak_kib, own + shared)


def descendants(roots: set[int]) -> set[int]:
    """Processes of this user whose parent, or its parent, and so on, is among roots."""
    parents: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    found = set(roots)
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def resident_kib(process: int) -> tuple[int, int] | None:
    """(own, shared) resident memory; None when the process is gone."""
    try:
        _, resident, shared = Path(f"/proc/{process}/statm").read_text().split()[:3]
    except OSError:
        return None
    return (int(resident) - int(shared)) * PAGE_KIB, int(shared) * PAGE_KIB


def watched(*arguments: str, python: Path = Path(sys.executable), also: Sequence[int] = ()) -> Ended:
    """`python ARGUMENTS...` from the repository's root with one thread.

    also: processes that serve it and were there before. Raises RuntimeError when it fails.
    """
    # every simulator has its bytecode beside its code, as pip has put it there
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}
    environment: Mapping[str, str] = os.environ | own
    with tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            [str(python), *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdout is not None
        with TreeMemory([process.pid, *also]) as memory:
            output = process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(
                f"{' '.join(arguments)}: exit code {process.returncode}: {errors.read()[-3000:]}"
            )
    return Ended(seconds, usage.ru_utime + usage.ru_stime, memory.peak_kib, output)
