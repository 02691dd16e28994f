"""Recipes of the papers are what their sheets say, and every difference from a paper has a reason."""

from typing import Any

import pytest
from pydantic import ValidationError

from benchmarks.paper_sheets import PAGE, Value, page, read_sheets, recipe
from benchmarks.paper_tables import PAPERS
from benchmarks.table import EXPERIMENTS, RESULTS, tables

SHEETS = read_sheets()


def test_every_paper_has_a_sheet() -> None:
    assert SHEETS.keys() == PAPERS.keys()


@pytest.mark.parametrize("name", SHEETS)
def test_a_recipe_is_what_its_sheet_says(name: str) -> None:
    """`python -m benchmarks.paper_sheets` writes it; a key that is changed by hand differs from its sheet."""
    text = (EXPERIMENTS / f"{name}_as_published.yaml").read_text()
    assert text == recipe(name, SHEETS[name])


def test_the_page_is_written_from_the_sheets() -> None:
    assert (RESULTS / PAGE).read_text() == page(SHEETS)


@pytest.mark.parametrize(
    "value",
    [
        {"paper": 300, "ours": 260},
        {"paper": "silent"},
        {"paper": 300, "why": "no difference"},
    ],
)
def test_a_difference_without_a_reason_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="why|ours"):
        Value.model_validate(value)


@pytest.mark.parametrize("name", [name for name, sheet in SHEETS.items() if sheet.table])
def test_a_table_of_the_papers_size_has_the_papers_protocol(name: str) -> None:
    """Its rows are the recipe's but for what the case and the method change."""
    size = SHEETS[name].table
    assert size is not None
    for row in tables()[size.name].rows:
        experiment = row.load(1)
        assert experiment.tasks.rounds == SHEETS[name].keys["tasks.rounds"].paper
        assert experiment.learner.batch_size == SHEETS[name].keys["learner.batch_size"].paper
    assert sum(map(len, (case.paper for case in size.cases.values()))) == sum(
        bool(row.paper) for row in tables()[size.name].rows
    )
