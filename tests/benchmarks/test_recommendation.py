"""README's first table and the page of advice say what the committed results say."""

from pathlib import Path

import pytest

from benchmarks.marked_blocks import with_blocks
from benchmarks.recommendation import ADVICE, README, THREATS, WHICH, advice, gains, rendered
from benchmarks.table import RESULTS, table_called


def test_the_blocks_are_kept_with_the_results() -> None:
    assert (RESULTS / "recommendation.md").read_text() == f"{gains()}\n{advice()}"


@pytest.mark.parametrize("path", [README, WHICH, THREATS], ids=lambda path: path.name)
def test_figures_are_those_of_the_results(path: Path) -> None:
    assert path.read_text() == rendered(path), "run: python -m benchmarks.recommendation"


def test_advice_names_rows_and_measures_that_exist() -> None:
    for each in ADVICE:
        for _, name, row, measure in each.evidence:
            table = table_called(name)
            assert row in {found.label for found in table.rows}, row
            assert measure in table.measures, measure


def test_a_page_without_the_marks_is_named() -> None:
    assert with_blocks("a <!-- x --> old <!-- end of x --> b", {"x": "new"}) == (
        "a <!-- x -->\n\nnew\n<!-- end of x --> b"
    )
    with pytest.raises(ValueError, match="needs <!-- x -->"):
        with_blocks("nothing", {"x": "new"})
