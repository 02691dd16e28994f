"""The mutation campaign: a seeded and stratified sample, mutants that change the code, a right interval."""

import ast
import gc
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

pytest.importorskip("cosmic_ray", reason="the dev extra is not installed")

from benchmarks import mutants
from benchmarks.covering_tests import CoveringTests
from benchmarks.mutation import batches
from benchmarks.mutation_page import page, tried, wilson
from benchmarks.warm_process import Change, replace_functions

ROOT = Path(__file__).resolve().parents[2]
SOURCE = '''"""A module."""

LIMIT = 3


def clipped(value: int | None, wide: bool = False) -> int | None:
    """At most LIMIT."""
    if value is None or value < LIMIT and not wide:
        return value
    return LIMIT * 2 if wide else LIMIT
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two files in one of the rooms, one much larger than the other."""
    (tmp_path / "learning").mkdir()
    (tmp_path / "learning" / "small.py").write_text(SOURCE)
    shutil.copy(ROOT / "learning" / "losses.py", tmp_path / "learning" / "large.py")
    return tmp_path


def test_the_sample_is_the_same_for_the_same_seed_and_covers_every_file(tree: Path) -> None:
    first, again, other = (mutants.sample(tree, 12, seed) for seed in (1, 1, 2))
    assert first == again != other
    by_file = [mutant.file for mutant in first]
    assert by_file.count("learning/large.py") > by_file.count("learning/small.py") >= 1
    places = [(mutant.file, mutant.line, mutant.column) for mutant in first]
    assert len(set(places)) == len(places)


def test_each_mutant_changes_the_code_and_nothing_without_behaviour(tree: Path) -> None:
    for mutant in mutants.sample(tree, 40, 3):
        before = (tree / mutant.file).read_text()
        after = mutant.source(tree)
        assert ast.dump(ast.parse(before)) != ast.dump(ast.parse(after))
        if mutant.file.endswith("small.py"):
            # no operator of an annotation, and the line of the change is the one that it says
            assert "value: int | None, wide: bool" in after and "-> int | None" in after
            assert before.splitlines()[mutant.line - 1] != after.splitlines()[mutant.line - 1]
            assert mutant.statement == (0 if mutant.line < 7 else mutant.statement) <= mutant.line


def test_the_likeliest_tests_come_first() -> None:
    lines = {"a.py": {"3": ["one", "all"], "4": ["all"], "9": ["slow"]}, "b.py": {"1": ["all"]}}
    tests = CoveringTests(lines, {"one": 0.1, "all": 0.1, "slow": 9.0})
    assert tests.of("a.py", 3, 3) == ["one", "all"]
    assert tests.of("a.py", 3, 4) == ["one", "all"]
    assert tests.of("a.py", 5, 6) == []
    assert tests.of("a.py", 0, 1) == ["one", "all", "slow"]
    tests.replace("all", {"a.py": {"9": ["new"]}}, {"new": 0.2})
    assert tests.of("a.py", 9, 9) == ["new", "slow"]


def test_what_runs_at_import_is_held_by_tests_of_importers_and_by_those_that_run_no_line(tree: Path) -> None:
    (tree / "learning" / "user.py").write_text("from perennial.learning.names import Names")
    (tree / "tests").mkdir()
    (tree / "tests" / "test_names.py").write_text("from perennial.learning.names import Names")
    lines = {"learning/user.py": {"3": ["of user"]}, "learning/small.py": {"7": ["tests/test_small.py::it"]}}
    quick = {"tests/test_names.py::it": 0.1, "tests/test_pages.py::it": 0.2, "of user": 9.0}
    tests = CoveringTests(lines, quick | {"tests/test_small.py::it": 0.1, "tests/test_slow.py::it": 5.0})
    assert tests.of("learning/names.py", 0, 3) == []
    found = tests.at_import("learning/names.py", tree)
    assert found == ["tests/test_names.py::it", "of user", "tests/test_pages.py::it"]


COVERED = """
def of_test(x):
    return x + 1

def of_shared_fixture():
    return 2

def of_own_fixture():
    return 3
"""
COVERING = """
import importlib.util
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("covered", Path("learning/covered.py"))
covered = importlib.util.module_from_spec(spec)
spec.loader.exec_module(covered)

@pytest.fixture(scope="module")
def shared():
    return covered.of_shared_fixture()

@pytest.fixture
def own():
    return covered.of_own_fixture()

class TestThing:
    @pytest.mark.parametrize("x", [1, 2])
    def test_in_a_class(self, x):
        assert covered.of_test(x) == x + 1

def test_first(shared):
    assert shared == 2

def test_second(shared, own):
    assert (shared, own) == (2, 3)

def test_that_fails():
    assert covered.of_test(1) == 3
"""


def test_tests_are_known_in_classes_and_by_what_their_fixtures_run(tmp_path: Path) -> None:
    (tmp_path / "learning").mkdir()
    (tmp_path / "learning" / "covered.py").write_text(COVERED)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_covering.py").write_text(COVERING)
    program = (
        "from pathlib import Path; from benchmarks.covering_tests import run_under_coverage; "
        "root = Path.cwd(); "
        "run_under_coverage(root, 'tests/test_covering.py', root / 'coverage.db', root / 'found.json')"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True)
    found = CoveringTests.read(tmp_path / "found.json")
    test = "tests/test_covering.py::"
    assert found.lines == {
        "learning/covered.py": {
            "3": [f"{test}TestThing::test_in_a_class"],
            "6": [f"{test}test_first", f"{test}test_second"],
            "9": [f"{test}test_second"],
        }
    }
    assert set(found.seconds) == {
        f"{test}{name}"
        for name in ("TestThing::test_in_a_class", "test_first", "test_second", "test_that_fails")
    }


def test_the_interval_is_wilsons() -> None:
    # Newcombe 1998, table I: 81 of 263 gives 0.2553 to 0.3662; 0 of 20 gives 0 to 0.1611
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


def result(number: int, how: str, by: str = "") -> dict[str, Any]:
    key = f"data/x.py:{number}:0 core/AddNot#0"
    return {"key": key, "file": "data/x.py", "how": how, "by": by, "tests": 2, "met": 1}


def test_the_page_states_the_share_at_first_and_now_and_every_survivor() -> None:
    lines = [result(n, "failed") for n in range(7)]
    lines += [result(7, "survived"), result(8, "survived"), result(9, "hung"), result(10, "hung")]
    lines += [result(6, "survived"), result(6, "failed")]
    lines += [result(7, "failed", "tests/test_new.py::test_it") | {"added": True}]
    reasons = {
        "data/x.py:8:0 core/AddNot#0": "equivalent: both branches are the same",
        "data/x.py:9:0 core/AddNot#0": "a loop without end",
    }
    text = page(tried(lines, reasons), 11, "Made here.")
    # of two that hang one has been looked at, and counts; the one that a new test notices counts now
    assert "| all | 11 | 8 | 9 | 81.8% |" in text and "Not finished" not in text
    assert "| `data/x.py:8:0 core/AddNot#0` | 1 of 2 | equivalent: both branches are the same |" in text
    assert "Without the 1 that are said to be equivalent below, the tests notice 9 of 10, 90.0%" in text
    assert "| `data/x.py:10:0 core/AddNot#0` | 1 of 2 | not yet looked at |" in text
    assert "noticed by `tests/test_new.py::test_it`" in text
    assert "**Not finished: 11 of 20 mutants" in page(tried(lines, reasons), 20, "Made here.")


def test_batches_hold_the_tests_in_their_order_within_the_seconds() -> None:
    names = [str(number) for number in range(60)]
    tests = CoveringTests({}, dict.fromkeys(names, 1.0))
    found = [*batches(names, tests, math.inf)]
    assert [len(batch) for batch in found] == [3, 24, 33]
    assert [name for batch in found for name in batch] == names
    assert [len(batch) for batch in batches(names, tests, 3.0)] == [3]
    assert [len(batch) for batch in batches(names, tests, 10.0)] == [3, 7]
    # one test that is longer than all the time there is runs all the same
    assert [*batches(["long"], CoveringTests({}, {"long": 99.0}), 3.0)] == [["long"]]


PROGRAM = """
from functools import cache

LIMIT = 3

def outer(x):
    def inner(y):
        return y + 1
    return inner(x)

@cache
def cached(x, by=2):
    return x * by

class Thing:
    @property
    def size(self):
        return [n + 1 for n in range(2)]
"""


def loaded(path: Path) -> tuple[dict[str, Any], dict[str, list[FunctionType]]]:
    """The program's names, and all of its functions by file."""
    names: dict[str, Any] = {}
    exec(compile(PROGRAM, str(path), "exec"), names)
    code = [found for found in gc.get_objects() if type(found) is FunctionType]
    return names, {str(path): [one for one in code if one.__code__.co_filename == str(path)]}


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        ("y + 1", "y - 1", (4, 10, [1, 2])),
        ("x * by", "x + by", (6, 7, [1, 2])),
        ("n + 1", "n - 1", (6, 10, [-1, 0])),
    ],
)
def test_a_change_inside_a_function_takes_effect_wherever_it_is_referred_to(
    tmp_path: Path, before: str, after: str, outcome: tuple[int, int, list[int]]
) -> None:
    names, functions = loaded(tmp_path / "program.py")
    thing, outer, cached = names["Thing"](), names["outer"], names["cached"]
    change = Change(tmp_path / "program.py", PROGRAM, PROGRAM.replace(before, after))
    assert replace_functions(change, functions)
    assert (outer(5), cached(5), thing.size) == outcome


@pytest.mark.parametrize(
    ("before", "after"), [("LIMIT = 3", "LIMIT = 4"), ("by=2", "by=3"), ("@cache\n", "")]
)
def test_any_other_change_needs_a_new_import(tmp_path: Path, before: str, after: str) -> None:
    names, functions = loaded(tmp_path / "program.py")
    change = Change(tmp_path / "program.py", PROGRAM, PROGRAM.replace(before, after))
    assert not replace_functions(change, functions) and names["cached"](5) == 10
