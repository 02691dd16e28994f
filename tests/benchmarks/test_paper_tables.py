"""Each paper's claims stand in one table; tables of a paper's size are whole and start only when asked."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.grid import jobs
from benchmarks.paper_sheets import PAGE, Value, page, read_sheets, recipe
from benchmarks.paper_tables import PAPERS, UNTESTED, paper_of
from benchmarks.table import EXPERIMENTS, RESULTS, tables
from perennial.config.experiment import load_experiment

FOUND = tables()
SAMPLES_LIMITS: dict[str, set[int | None]] = {
    "fedperc_cifar100_resnet34": {20_000},
    "analytic_ham10000_400": {2_000, None},
}
"""Tables with rows on a part of the data: FedPerC's, as in the paper, and one with rows of both sizes."""


@pytest.mark.parametrize("paper", PAPERS)
def test_a_paper_has_an_experiment_as_published_and_tables_of_both_sizes(paper: str) -> None:
    load_experiment(EXPERIMENTS / f"{paper}_as_published.yaml")
    assert {table.scale for name, table in FOUND.items() if paper_of(name) == paper} == {"cpu", "paper"}


def test_untested_claims_name_tables_that_are_there() -> None:
    named = {word for each in UNTESTED for word in each.why.split("`")[1::2]}
    assert named and named <= FOUND.keys()


@pytest.mark.parametrize("name", [name for name, table in FOUND.items() if table.scale == "paper"])
def test_a_table_at_the_papers_size_is_whole(name: str) -> None:
    planned = jobs(FOUND[name])
    assert len({job.settings for job in planned}) == len(planned)
    assert len(FOUND[name].seeds) >= 3
    limits = {row.load(1).data.samples_limit for row in FOUND[name].rows}
    assert limits == SAMPLES_LIMITS.get(name, {None})


def test_a_table_at_the_papers_size_waits_to_be_asked(tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["tricon_sf_ham10000_paper", "--results", str(tmp_path)])
    assert refused.exit_code != 0
    assert "--scale paper" in refused.output + str(refused.exception)
    assert not list(tmp_path.iterdir())


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
    "value", [{"paper": 300, "ours": 260}, {"paper": "silent"}, {"paper": 300, "why": "no difference"}]
)
def test_a_difference_without_a_reason_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="why|ours"):
        Value.model_validate(value)


AT_SIZE = [name for name, table in FOUND.items() if table.scale == "paper" and paper_of(name)]


@pytest.mark.parametrize("name", AT_SIZE)
def test_a_table_of_the_papers_size_has_the_papers_protocol(name: str) -> None:
    """Its rows come from the sheet; what the sheet gives a reason for is all that differs from the paper."""
    paper = paper_of(name)
    assert paper is not None
    size, keys = SHEETS[paper].table, SHEETS[paper].keys
    rows = {row.label: row for row in FOUND[name].rows}
    for label, case in size.cases.items():
        if name != (case.table or size.name):
            continue
        changes = size.changes | case.changes
        for key in changes.keys() & keys.keys():
            said = keys[key].paper
            if said == "silent" or isinstance(said, list):
                told = said if isinstance(said, list) else [said]
                assert changes[key].paper in told, f"{key}: the paper has {said}"
        for method in size.methods:
            row = rows.pop(size.label(label, method))
            experiment = row.load(1)
            assert experiment.tasks.rounds == (keys | changes)["tasks.rounds"].used
            assert experiment.learner.batch_size == keys["learner.batch_size"].used
            assert bool(row.paper) == (method in case.paper)
    assert not rows
