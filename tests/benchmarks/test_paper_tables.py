"""Every table of the papers has one here; those at the papers' size are whole and start only when asked."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from perennial.benchmarks.__main__ import app
from perennial.benchmarks.grid import jobs
from perennial.benchmarks.paper_tables import PAPER_TABLES, PaperTable, coverage
from perennial.benchmarks.table import Table, tables

FOUND = tables()
SAMPLES_LIMITS: dict[str, set[int | None]] = {
    "fedperc_cifar100_resnet34": {20_000},
    "analytic_ham10000_400": {2_000, None},
}
"""Tables with rows on a part of the data: FedPerC's, as in the paper, and one with rows of both sizes."""


@pytest.mark.parametrize("each", PAPER_TABLES, ids=lambda each: f"{each.paper} {each.label}")
def test_a_table_of_a_paper_has_one_here_at_cpu_size(each: PaperTable) -> None:
    assert each.found(FOUND, "cpu")


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


@pytest.mark.slow
def test_a_table_at_the_papers_size_tells_its_cost(tmp_path: Path) -> None:
    name = "tricon_sf_ham10000_paper"
    missing = Path(FOUND[name].rows[0].load(1).data.path or "")
    if not missing.exists():
        pytest.skip(f"needs {missing.name}")
    told = CliRunner().invoke(app, [name, "--results", str(tmp_path), "--estimate"])
    assert f"{len(jobs(FOUND[name]))} runs, about" in told.output
    assert not list(tmp_path.iterdir())


def test_the_page_lists_both_sizes() -> None:
    lines = list(
        coverage({"pp_fcil_digits": Table("small", []), "fedperc_x": Table("large", [], scale="paper")})
    )
    assert "| PP-FCIL | table 4 | without each part | `pp_fcil_digits` | none |" in lines
    assert any(line.endswith("| none | `fedperc_x` |") for line in lines)
