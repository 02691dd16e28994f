"""The list of what a later Flower would break is that of the committed trial, and is made by looking."""

import sys

from benchmarks.later_flower import PAGE, REPLACED, compare, look, rendered
from perennial.deploy.flower_seam import PRIVATE


def test_the_page_holds_the_committed_list() -> None:
    page = PAGE.read_text()
    assert rendered(page) == page, "run: python -m benchmarks.later_flower"


def test_every_name_is_found_in_the_flower_that_perennial_runs_on() -> None:
    here = look(sys.executable)
    replaced = {f"{module}.{part}" for module, parts in REPLACED.items() for part in parts}
    assert here.keys() == PRIVATE.keys() | replaced
    assert not [name for name, found in here.items() if isinstance(found, str)]
    assert compare(here, here) == {}


def test_what_is_gone_or_is_called_otherwise_is_named() -> None:
    here = {"a": ["x", "y"], "b": ["x"], "c": [], "d": ["x", "y"]}
    there = {"a": ["x", "z"], "b": "gone: ModuleNotFoundError", "c": [], "d": ["y", "x"]}
    assert compare(here, there) == {
        "a": "without y; with z",
        "b": "gone: ModuleNotFoundError",
        "d": "other order of parameters",
    }
