"""Runs of pytest in forks of a process that has imported the libraries and our code.

A fork takes a change to the code in one of two ways. A change inside functions replaces the code of these
functions, wherever they are referred to. Any other change (a constant, a default, a decorator) takes effect
only when the file is imported again, so the fork forgets our modules first, which costs it some seconds.
"""

import contextlib
import gc
import importlib
import inspect
import json
import os
import pkgutil
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

LIBRARIES = (
    "torch",
    "flwr.app",
    "flwr.serverapp",
    "flwr.clientapp",
    "pytest",
    "hypothesis",
    "pydantic",
    "yaml",
    "sklearn.datasets",
    "safetensors.torch",
    "scipy.stats",
    "typer",
    "typer.testing",
    "PIL.Image",
    "opacus",
    "_hypothesis_pytestplugin",
    "pytest_timeout",
)
OURS = ("foundation", "data", "models", "privacy", "config", "protocol", "learning", "client", "strategies")
OURS += ("server", "engine", "deploy", "cli")
PATIENCE = 8.0
"""Tests that take this many times their usual processor time, and a minute, hang."""
STANDSTILL = 180.0
"""Seconds in which a fork takes no processor time, and waits for no processor, after which it hangs."""
_STEP = 0.05
_OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-o", "timeout=0")
PLUGINS = ("_hypothesis_pytestplugin", "pytest_timeout")
"""Of pytest; any other would be imported anew by each fork."""


@dataclass(frozen=True)
class Change:
    """A change to one file of the code.

    path: of the file.
    before, after: its text.
    """

    path: Path
    before: str
    after: str


@dataclass(frozen=True)
class Verdict:
    """What became of one run of pytest.

    how: survived (every test passed), failed, or hung.
    by: the test that failed first.
    """

    how: str
    by: str = ""


class WarmProcess:
    """This process, after it has imported everything. Make one, late: ours is then imported from root.

    root: the copy of the checkout whose code and tests run.
    """

    def __init__(self, root: Path, checkout: Path) -> None:
        self.root = root
        for name in LIBRARIES:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        import torch

        torch.set_num_threads(1)
        _use_a_fixed_hypothesis()
        forget_ours()
        os.environ["PYTHONPATH"] = str(root)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        sys.path[:] = [str(root), *(part for part in sys.path if Path(part or ".").resolve() != checkout)]
        for name in _all_of_ours():
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        gc.collect()
        self._functions: dict[str, list[FunctionType]] = {}
        for found in gc.get_objects():
            if type(found) is FunctionType:
                self._functions.setdefault(found.__code__.co_filename, []).append(found)
        # a fork copies each page of memory that it writes to, and a collection would write to all of them
        gc.freeze()

    def fork(self, work: Callable[[], Any], usual: float) -> Any:
        """What work returns in a fork: some kilobytes of JSON. None when the fork died.

        usual: seconds of processor time that the work takes.
        Raises TimeoutError when it hangs: by processor time, or because nothing happens any more.
        """
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            os.setsid()
            seconds = int(60 + PATIENCE * usual)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 10))
            os.chdir(self.root)
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
            with os.fdopen(writer, "w") as out:
                json.dump(work(), out)
            os._exit(0)
        os.close(writer)
        try:
            status = _wait(child)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        with os.fdopen(reader) as said:
            text = said.read()
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
            raise TimeoutError(
                f"{PATIENCE:g} times the usual {usual:.1f} s, or {STANDSTILL:g} s of standstill"
            )
        return json.loads(text) if text else None

    def pytest(self, tests: Sequence[str], usual: float, change: Change | None = None) -> Verdict:
        """Run tests until the first that fails, with a change to the code if one is given."""

        def work() -> dict[str, str]:
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            if change is not None and not replace_functions(change, self._functions):
                forget_ours()
            return run_pytest(tests)

        try:
            found = self.fork(work, usual)
        except TimeoutError:
            return Verdict("hung")
        return Verdict("failed", "the process ended") if found is None else Verdict(**found)


def run_pytest(tests: Sequence[str]) -> dict[str, str]:
    """{how, by} of one run in this process."""
    import pytest

    class First:
        """Remembers the first test that failed."""

        by = ""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed and not self.by:
                self.by = report.nodeid

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed and not self.by:
                self.by = report.nodeid

    first = First()
    plugins = [option for name in PLUGINS for option in ("-p", name)]
    code = pytest.main([*_OPTIONS, *plugins, *tests], [first])
    return {"how": "survived" if code == 0 else "failed", "by": first.by}


def replace_functions(change: Change, functions: Mapping[str, Sequence[FunctionType]]) -> bool:
    """Give the functions of an imported file their changed code. False when something else changed too.

    functions: all that there are, by the file that they were compiled from.
    """
    path = str(change.path)
    pairs: list[tuple[CodeType, CodeType]] = []
    before, after = (compile(text, path, "exec", dont_inherit=True) for text in (change.before, change.after))
    if not _pair(before, after, pairs):
        return False
    named = Counter(_name(old) for old, _ in pairs)
    changed = {_name(old): new for old, new in pairs if old != new}
    if any(named[name] > 1 for name in changed):
        return False
    for function in functions.get(path, ()):
        new = changed.get(_name(function.__code__))
        if new is not None:
            if new.co_freevars != function.__code__.co_freevars:
                return False
            function.__code__ = new
    return True


def _name(code: CodeType) -> tuple[str, int]:
    """What tells the functions of a file apart, but for two lambdas in one line."""
    return code.co_qualname, code.co_firstlineno


def forget_ours() -> None:
    """Ours must be imported again, from where sys.path says now."""
    for name in [name for name in sys.modules if name.split(".")[0] == "perennial"]:
        del sys.modules[name]


def _pair(old: CodeType, new: CodeType, pairs: list[tuple[CodeType, CodeType]]) -> bool:
    """Put into pairs the functions at and below two pieces of code, if these differ in functions alone."""
    function = old.co_flags & inspect.CO_NEWLOCALS != 0
    if function:
        pairs.append((old, new))
    elif (old.co_code, old.co_names) != (new.co_code, new.co_names):
        return False
    if len(old.co_consts) != len(new.co_consts):
        return function
    for one, other in zip(old.co_consts, new.co_consts, strict=True):
        if isinstance(one, CodeType) and isinstance(other, CodeType):
            if not _pair(one, other, pairs):
                return False
        elif not function and (type(one) is not type(other) or one != other):
            return False
    return True


def _all_of_ours() -> Iterator[str]:
    for room in OURS:
        package = importlib.import_module(f"perennial.{room}")
        yield from (found.name for found in pkgutil.walk_packages(package.__path__, f"perennial.{room}."))


def _use_a_fixed_hypothesis() -> None:
    """The same examples in each run, and no limit by the clock, which a busy machine would miss."""
    from hypothesis import HealthCheck, settings

    unhurried = [HealthCheck.too_slow]
    settings.register_profile(
        "mutation", deadline=None, derandomize=True, database=None, suppress_health_check=unhurried
    )
    settings.load_profile("mutation")


def _wait(child: int) -> int:
    """The status with which a child ends; one at a standstill is killed."""
    quiet_since, spent, looked = time.monotonic(), -1.0, 0.0
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        now = time.monotonic()
        if now - looked > 2.0:
            looked = now
            seconds, waiting = _activity(child)
            if waiting or seconds != spent:
                quiet_since, spent = now, seconds
            if now - quiet_since > STANDSTILL:
                os.kill(child, signal.SIGKILL)
        time.sleep(_STEP)


def _activity(root: int) -> tuple[float, bool]:
    """(ticks of processor time of a process and all below it, whether one of them wants a processor)."""
    parents: dict[int, int] = {}
    found: dict[int, tuple[float, bool]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
                found[int(entry.name)] = (float(fields[11]) + float(fields[12]), fields[0] in "RD")
    below = {root}
    while more := {process for process, parent in parents.items() if parent in below} - below:
        below |= more
    of_these = [found[process] for process in below if process in found]
    return sum(ticks for ticks, _ in of_these), any(wants for _, wants in of_these)
