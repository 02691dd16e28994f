"""Which fast tests run which lines of the code, and how long each takes: measured once by coverage.py."""

import contextlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.mutants import ROOMS
from benchmarks.warm_process import PLUGINS, WarmProcess
from perennial.foundation.files import replace_file

if TYPE_CHECKING:
    from coverage import Coverage

USUAL = 120.0
"""Seconds of processor time that the tests of one file may usually take."""

QUICK, FEW = 1.0, 50
"""Seconds of a quick test, and the lines that one counts as that runs none."""

Lines = dict[str, dict[str, list[str]]]
"""file -> line -> tests. A test is `tests/test_x.py::name`, with all its parameters."""


@dataclass(frozen=True)
class CoveringTests:
    """Which tests run which lines, and how long each test takes.

    seconds: of each test.
    """

    lines: Lines
    seconds: dict[str, float]

    @classmethod
    def read(cls, path: Path) -> "CoveringTests":
        """What `measure` wrote."""
        return cls(**json.loads(path.read_text()))

    def of(self, file: str, first: int, line: int) -> list[str]:
        """Tests that run the lines first to line, those first that run little else, then the quicker.

        first: 0 for what runs at import (a constant, a default), which any test of the file sees.
        """
        here = self.lines.get(file, {})
        lines = here if first == 0 else map(str, range(first, line + 1))
        return self._in_order({test for other in lines for test in here.get(other, [])})

    def at_import(self, file: str, root: Path) -> list[str]:
        """Tests that what a file does when it is imported can touch, in the order of `of`.

        They run its lines, or those of a file that imports it; or they stand in a file that imports it; or
        they run no line at all, because they look at classes, defaults or pages.
        """
        name = f"perennial.{file.removesuffix('.py').replace('/', '.')}"
        test_files = {test.partition("::")[0] for test in self.seconds}
        importers = {
            other
            for other in {*self.lines, *test_files}
            if (root / other).exists() and f"from {name} import" in (root / other).read_text()
        }
        tests = {test for other in {file, *importers} for test in self.of(other, 0, 0)}
        tests |= {test for test in self.seconds if test.partition("::")[0] in importers}
        tests |= {
            test for test, seconds in self.seconds.items() if not self._line_counts[test] and seconds < QUICK
        }
        return self._in_order(tests)

    def _in_order(self, tests: Iterable[str]) -> list[str]:
        counts = self._line_counts
        return sorted(tests, key=lambda test: ((counts[test] or FEW) * self.seconds.get(test, 1.0), test))

    def replace(self, file: str, lines: Lines, seconds: dict[str, float]) -> None:
        """Forget what is known of one test file, and hold this instead."""
        for tests_of in self.lines.values():
            for line in tests_of:
                tests_of[line] = [test for test in tests_of[line] if not test.startswith(f"{file}::")]
        for name, found in lines.items():
            here = self.lines.setdefault(name, {})
            for line, tests in found.items():
                here[line] = [*here.get(line, []), *tests]
        self.seconds.update(seconds)
        self.__dict__.pop("_line_counts", None)

    @cached_property
    def _line_counts(self) -> Counter[str]:
        """How many lines each test runs."""
        return Counter(test for lines in self.lines.values() for tests in lines.values() for test in tests)


def measure(warm: WarmProcess, out: Path, files: Sequence[str]) -> None:
    """Run the fast tests of some files under coverage.py, and add to `out` which line is whose."""
    out.parent.mkdir(parents=True, exist_ok=True)
    database, found = (out.parent / name for name in ("coverage.db", "of-one-file.json"))
    for number, file in enumerate(files, start=1):
        for left in (database, found):
            left.unlink(missing_ok=True)
        began = time.monotonic()
        with contextlib.suppress(TimeoutError):
            warm.fork(lambda file=file: run_under_coverage(warm.root, file, database, found), USUAL)
        print(f"{number}/{len(files)} {time.monotonic() - began:6.1f} s {file}", flush=True)
        if found.exists():
            known = CoveringTests.read(out) if out.exists() else CoveringTests({}, {})
            one = CoveringTests.read(found)
            known.replace(file, one.lines, one.seconds)
            replace_file(out, json.dumps({"lines": known.lines, "seconds": known.seconds}).encode())


class WhoRuns:
    """A plugin of pytest that tells coverage.py for whom lines run, and notes how long each test takes.

    What a fixture of several tests runs is done once, for all tests that ask for the fixture.
    """

    def __init__(self, coverage: "Coverage") -> None:
        self._coverage = coverage
        self._now = ""
        self.users: dict[str, set[str]] = defaultdict(set)
        """Tests by context: the name of a test, or the one of a fixture."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """What a test, and the fixtures that are its alone, run."""
        test = name_of(item.nodeid)
        for context in (test, *getattr(item, "fixturenames", ())):
            self.users[context].add(test)
        with self._context(test):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """What a fixture of several tests runs."""
        with self._context(self._now if fixturedef.scope == "function" else fixturedef.argname):
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Seconds of set-up, test and tear-down."""
        self.seconds[name_of(report.nodeid)] += report.duration
        if report.failed:
            self.failed.add(name_of(report.nodeid))

    @contextlib.contextmanager
    def _context(self, name: str) -> Generator[None]:
        before, self._now = self._now, name
        self._coverage.switch_context(name)
        yield
        self._now = before
        self._coverage.switch_context(before)


def name_of(test: str) -> str:
    """`tests/test_x.py::name`, of a test with one of its parameters."""
    return test.partition("[")[0]


def run_under_coverage(root: Path, file: str, database: Path, out: Path) -> int:
    """Run one file of tests, and write which of them runs which line. Returns what pytest does."""
    from coverage import Coverage

    coverage = Coverage(
        data_file=str(database),
        include=[f"{root}/{room}/*" for room in ROOMS],
        config_file=False,
    )
    options = ["-m", "not slow", "-p", "no:cacheprovider", "-o", "timeout=0"]
    options += [option for name in PLUGINS for option in ("-p", name)]
    who = WhoRuns(coverage)
    coverage.start()
    code = pytest.main([*options, file], [who])
    coverage.stop()
    data = coverage.get_data()
    lines: Lines = {}
    for path in sorted(data.measured_files()):
        for line, contexts in sorted(data.contexts_by_lineno(path).items()):
            tests = {test for context in contexts for test in who.users.get(context, ())} - who.failed
            if tests:
                lines.setdefault(str(Path(path).relative_to(root)), {})[str(line)] = sorted(tests)
    replace_file(out, json.dumps({"lines": lines, "seconds": who.seconds}).encode())
    return int(code)
