"""Which fast tests run which lines of the code, and how long each takes: measured once by coverage.py."""

import contextlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from xml.etree import ElementTree

from perennial.benchmarks.mutants import ROOMS
from perennial.benchmarks.warm_process import PLUGINS, WarmProcess
from perennial.foundation.files import replace_file

USUAL = 120.0
"""Seconds of processor time that the tests of one file may usually take."""

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
        tests = {test for other in lines for test in here.get(other, [])}
        return sorted(tests, key=lambda test: (self._line_counts[test] * self.seconds.get(test, 1.0), test))

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
    database, report = (out.parent / name for name in ("coverage.db", "tests.xml"))
    for number, file in enumerate(files, start=1):
        for left in (database, report):
            left.unlink(missing_ok=True)
        began = time.monotonic()
        with contextlib.suppress(TimeoutError):
            warm.fork(lambda file=file: _run_under_coverage(warm.root, file, database, report), USUAL)
        print(f"{number}/{len(files)} {time.monotonic() - began:6.1f} s {file}", flush=True)
        if database.exists() and report.exists():
            known = CoveringTests.read(out) if out.exists() else CoveringTests({}, {})
            known.replace(file, *_measured(warm.root, database, report))
            replace_file(out, json.dumps({"lines": known.lines, "seconds": known.seconds}).encode())


def _run_under_coverage(root: Path, file: str, database: Path, report: Path) -> int:
    import pytest
    from coverage import Coverage

    coverage = Coverage(
        data_file=str(database),
        include=[f"{root}/{room}/*" for room in ROOMS],
        config_file=False,
    )
    coverage.set_option("run:dynamic_context", "test_function")
    options = ["-m", "not slow", "-p", "no:cacheprovider", "-o", "timeout=0"]
    options += [option for name in PLUGINS for option in ("-p", name)]
    coverage.start()
    code = pytest.main([*options, f"--junitxml={report}", "-o", "junit_family=xunit1", file])
    coverage.stop()
    coverage.save()
    return int(code)


def _measured(root: Path, database: Path, report: Path) -> tuple[Lines, dict[str, float]]:
    """Lines and seconds of the tests that passed."""
    from coverage import CoverageData

    seconds: dict[str, float] = {}
    names: dict[str, str] = {}
    failed: set[str] = set()
    for case in ElementTree.parse(report).iter("testcase"):
        function = case.attrib["name"].split("[")[0]
        test = f"{case.attrib['file']}::{function}"
        names[f"{Path(case.attrib['file']).stem}.{function}"] = test
        seconds[test] = seconds.get(test, 0.0) + float(case.attrib["time"])
        if {"failure", "error"} & {child.tag for child in case}:
            failed.add(test)
    data = CoverageData(basename=str(database))
    data.read()
    lines: Lines = {}
    for path in sorted(data.measured_files()):
        for line, contexts in sorted(data.contexts_by_lineno(path).items()):
            tests = {names.get(context.removeprefix("tests."), "") for context in contexts} - {"", *failed}
            if tests:
                lines.setdefault(str(Path(path).relative_to(root)), {})[str(line)] = sorted(tests)
    return lines, seconds
