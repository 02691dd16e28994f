"""Tables of results: what is run, what is kept, what is said of it, and that the page says what the
files say."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import grid
from benchmarks.controls import controls_of
from benchmarks.grid import finished, newest, read_results, run_table
from benchmarks.markdown import age, markdown
from benchmarks.paper_claims import Claim, judge
from benchmarks.results_page import PAGE, PICTURES, measured, page, pictures
from benchmarks.table import RESULTS, ROOT, Row, Table, table_called, tables

SMALL = {
    "name": "small",
    "data": {"source": "digits", "sites": 2, "samples_limit": 60, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 1},
    "model": {"name": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}},
}


def one_fast(names: Iterable[str]) -> list[Any]:
    """The first table for the fast suite, the others for the slow one."""
    first, *others = sorted(names)
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    monkeypatch.setattr("benchmarks.table.EXPERIMENTS", tmp_path)
    rows = [
        Row("as it is", "small"),
        Row("longer", "small", ("learner.epochs=2",), paper={"forgetting": 7.5}),
    ]
    claim = Claim("longer is better (nobody)", "longer", "as it is", "final accuracy")
    return Table("A small table", rows, seeds=(1, 2), claims=(claim,))


def test_what_is_done_is_not_run_again_and_what_has_changed_is(
    small: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, int]] = []
    run = grid.run_job

    def counted(experiment: Path, row: Row, seed: int, device: str, kept: Path | None) -> grid.Ran:
        ran.append((row.label, seed))
        return run(experiment, row, seed, device, kept)

    monkeypatch.setattr(grid, "run_job", counted)
    results = tmp_path / "results"
    assert not finished(small, results / "t.jsonl")
    first = run_table("t", small, lambda text: None, device="cpu", results=results)
    assert ran == [("as it is", 1), ("as it is", 2), ("longer", 1), ("longer", 2)]
    assert {run["seed"] for run in first} == {1, 2}
    assert len(finished(small, results / "t.jsonl")) == small.planned

    lines = (results / "t.jsonl").read_text().splitlines()
    (results / "t.jsonl").write_text("\n".join(lines[:3]) + "\n")
    again = run_table("t", small, lambda text: None, device="cpu", results=results)
    assert ran[4:] == [("longer", 2)]
    assert [r["model_sha256"] for r in again] == [r["model_sha256"] for r in first]

    changed = Table(small.title, [small.rows[0], Row("longer", "small", ("learner.epochs=3",))], seeds=(1, 2))
    run_table("t", changed, lambda text: None, device="cpu", results=results)
    assert ran[5:] == [("longer", 1), ("longer", 2)]
    assert len(read_results(results / "t.jsonl")) == 4
    assert "(paper: 7.5)" not in (results / "t.md").read_text()


def test_a_page_names_the_rows_whose_runs_are_older_than_the_record_of_accuracy_by_task(
    small: Table, tmp_path: Path
) -> None:
    made = run_table("t", small, lambda text: None, device="cpu", results=tmp_path)
    older = [{key: kept for key, kept in run.items() if key != "by_task"} for run in made]
    assert "No accuracy after each task" not in markdown("t", small, made, {})
    said = "No accuracy after each task, because the runs are older than its record: "
    assert f"\n{said}longer.\n" in markdown("t", small, made[:2] + older[2:], {})
    assert f"\n{said}longer, its other seeds.\n" in markdown("t", small, made[:3] + older[3:], {})
    assert f"\n{said}every row.\n" in markdown("t", small, older, {})


def test_a_new_label_keeps_the_results_and_a_new_measure_does_not(small: Table, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    run_table("t", small, lambda text: None, device="cpu", results=tmp_path)
    renamed = Table(small.title, [Row("other words", "small")], seeds=(1, 2))
    assert [run["row"] for run in finished(renamed, path).values()] == ["other words"] * 2
    measures = {**small.measures, "rounds": lambda summary: summary["rounds"]}
    assert not finished(Table(small.title, small.rows, small.seeds, measures), path)
    # the file of an experiment may change under a row that stays as it was
    experiment = small.rows[0].file
    experiment.write_text(experiment.read_text().replace("lr: 0.05", "lr: 0.06"))
    assert not finished(small, path)


def runs(better: list[float], worse: list[float]) -> list[dict[str, Any]]:
    return [
        {"row": row, "seed": seed, "measures": {"m": value}}
        for row, values in (("better", better), ("worse", worse))
        for seed, value in enumerate(values, 1)
    ]


TEN_ABOVE = [0.50, 0.60, 0.70, 0.61, 0.52], [0.401, 0.499, 0.60, 0.512, 0.419]


@pytest.mark.parametrize(
    ("better", "worse", "margin", "lower", "word"),
    [
        (*TEN_ABOVE, 0.0, False, "holds"),
        (*TEN_ABOVE, 0.0, True, "does not hold"),
        (*TEN_ABOVE, 12.0, False, "does not hold"),
        ([0.50, 0.60, 0.70, 0.61, 0.52], [0.60, 0.50, 0.70, 0.62, 0.50], 0.0, False, "undecided"),
        (TEN_ABOVE[0][:4], TEN_ABOVE[1][:4], 0.0, False, "undecided"),
        ([0.50], [0.40], 0.0, False, "not measured"),
        ([], [0.40, 0.50], 0.0, False, "not measured"),
    ],
)
def test_a_claim_is_judged_seed_by_seed(
    better: list[float], worse: list[float], margin: float, lower: bool, word: str
) -> None:
    claim = Claim("a claim", "better", "worse", "m", margin, lower)
    assert judge([(claim, runs(better, worse))])[0].word == word


def test_the_difference_is_paired() -> None:
    (verdict,) = judge([(Claim("", "better", "worse", "m"), runs([0.1, 0.9], [0.05, 0.87]))])
    assert verdict.effect is not None
    assert verdict.effect.mean == pytest.approx(4.0)
    # the quantile of one degree of freedom is 12.706; the standard error of 5 and 3 is 1
    assert verdict.effect.high == pytest.approx(4.0 + 12.706, abs=1e-3)


def test_verdicts_are_corrected_for_the_number_of_claims_on_the_page() -> None:
    claim = Claim("", "better", "worse", "m")
    clear, faint = runs(*TEN_ABOVE), runs([0.52, 0.50, 0.56, 0.51, 0.53], [0.49, 0.49, 0.51, 0.50, 0.515])
    assert judge([(claim, faint)])[0].word == "holds"
    assert [verdict.word for verdict in judge([(claim, faint)] * 3)] == ["undecided"] * 3
    both = judge([(claim, faint), (claim, clear)])
    assert [verdict.word for verdict in both] == ["holds", "holds"], (
        "the clear one leaves the faint its level"
    )
    first, second = (verdict.corrected for verdict in both)
    assert first is not None
    assert second is not None
    assert (first.level, second.level) == (pytest.approx(0.95), pytest.approx(0.975))


def require_data(name: str = "") -> None:
    """Skip a table whose maps follow from its data, where these are not here. Without a name: all tables."""
    rows = [row for other, table in tables().items() if name in ("", other) for row in table.rows]
    read = any("features: auto" in change for row in rows for change in row.changes)
    if read and not (ROOT.parent / "shared" / "data").exists():
        pytest.skip("../shared/data is not here")


@pytest.mark.parametrize("name", sorted(tables()))
def test_every_table_names_experiments_and_rows_that_exist(name: str) -> None:
    require_data(name)
    table = table_called(name)
    labels = [row.label for row in table.rows]
    assert len(set(labels)) == len(labels)
    for row in table.rows:
        row.load(table.seeds[0])
        assert row.paper.keys() <= table.measures.keys(), row.label
    for claim in table.claims:
        assert {claim.better, claim.worse} <= set(labels), claim.text
        assert claim.measure in table.measures, claim.text


@pytest.mark.slow
def test_the_results_page_and_its_pictures_are_what_the_committed_results_say() -> None:
    require_data()
    held = measured()
    assert PAGE.read_text() == page(held), "write it again: python -m benchmarks.results_page"
    drawn = {path.stem: path.read_text() for path in PICTURES.glob("*.svg")}
    assert drawn == pictures(held), "write them again: python -m benchmarks.results_page"


@pytest.mark.parametrize("name", one_fast(name for name, table in tables().items() if table.scale == "cpu"))
def test_a_table_of_cpu_size_is_there_whole_or_says_why_not_and_its_page_says_what_its_results_say(
    name: str,
) -> None:
    require_data(name)
    table = tables()[name]
    held = newest(table, RESULTS / f"{name}.jsonl")
    wanted = {(row.label, seed) for row in table.rows for seed in table.seeds}
    missing = wanted - {(run["row"], run["seed"]) for run in held}
    text = (RESULTS / f"{name}.md").read_text()
    if missing:
        why = table.pending.endswith(".") or age(held)
        assert why, f"run it again: python -m benchmarks {name}; or say why not: pending"
        count = f"{len(held)} of {len(wanted)} runs"
        section = PAGE.read_text().partition(f"{table.title}")[2][:1000]
        assert all(count in said and table.pending in said for said in (text, section))
    else:
        assert not table.pending, f"{name} is whole: take its pending away"
    assert len(table.seeds) >= 3 or "One seed: a survey" in table.note
    assert text == markdown(name, table, held, controls_of(table))
