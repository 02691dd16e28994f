"""The mutation campaign: a seeded and stratified sample, mutants that change the code, a right interval."""

import ast
import shutil
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="the dev extra is not installed")

from perennial.benchmarks import mutants
from perennial.benchmarks.covering_tests import CoveringTests
from perennial.benchmarks.mutation import page, wilson

ROOT = Path(__file__).resolve().parents[1]
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


def test_the_interval_is_wilsons() -> None:
    # Newcombe 1998, table I: 81 of 263 gives 0.2553 to 0.3662; 0 of 20 gives 0 to 0.1611
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


def test_the_page_states_the_share_and_every_survivor() -> None:
    found = [
        {"key": f"data/x.py:{n}:0 core/AddNot#0", "file": "data/x.py", "noticed": n > 0, "tests": 2}
        for n in range(10)
    ]
    text = page(found, {"data/x.py:0:0 core/AddNot#0": "equivalent: both branches are the same"})
    assert "| data | 10 | 9 | 90.0% |" in text and "| all | 10 | 9 | 90.0% |" in text
    assert "equivalent: both branches are the same" in text
