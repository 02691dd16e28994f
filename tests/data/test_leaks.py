"""Columns that are known only after the class: each is asked about, and tidy tables about nothing."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import datasets

from perennial.data.leaks import is_outcome
from perennial.data.survey import survey

ROWS = 500


def write(path: Path, columns: dict[str, Sequence[Any]]) -> Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(columns)
        out.writerows(zip(*columns.values(), strict=True))
    return path


def honest(
    seed: int = 0, rows: int = ROWS
) -> tuple[dict[str, Sequence[Any]], np.ndarray, np.random.Generator]:
    """A table whose columns tell something of the class, and whether each row is ill."""
    draw = np.random.default_rng(seed)
    ill = draw.random(rows) < 0.35
    values = {f"lab {k}": [f"{v:.2f}" for v in draw.normal(ill * 0.3 * k, 1)] for k in range(5)}
    return {**values, "diagnosis": np.where(ill, "ill", "well").tolist()}, ill, draw


def asked(path: Path) -> list[str]:
    return [str(each) for each in survey(path).questions]


def test_a_column_that_is_filled_for_the_ill_alone_is_asked_about(tmp_path: Path) -> None:
    table, ill, draw = honest()
    filled = np.where(ill, draw.random(ROWS) < 0.9, draw.random(ROWS) < 0.05)
    cells = [f"{draw.normal(0, 1):.2f}" if each else "" for each in filled]
    found = asked(write(tmp_path / "t.csv", {"biopsy score": cells, **table}))
    assert len(found) == 1 and "'biopsy score' is filled for 'ill' and mostly empty for 'well'" in found[0]


def test_a_column_that_tells_nineteen_of_twenty_is_asked_about(tmp_path: Path) -> None:
    table, ill, draw = honest()
    right = draw.random(ROWS) < 0.95
    told = np.where(right, ill, ~ill)
    for cells in ([f"{v:.2f}" for v in draw.normal(told * 8.0, 1)], np.where(told, "A4", "B1").tolist()):
        found = asked(write(tmp_path / "t.csv", {"procedure": cells, **table}))
        assert len(found) == 1 and "column 'procedure' alone tells the class rightly in 9" in found[0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("cells", [[""], ["inf", "1", "2"]], ids=["empty", "infinite"])
def test_a_column_without_spread_that_can_be_known_gives_no_warning(tmp_path: Path, cells: list[str]) -> None:
    table, _, _ = honest()
    column = [cells[row % len(cells)] for row in range(ROWS)]
    assert "result" not in " ".join(asked(write(tmp_path / "t.csv", {"result": column, **table})))


def test_outcomes_of_a_raw_study_table_are_asked_about_and_no_other_column(tmp_path: Path) -> None:
    """SUPPORT2's names: what is known at death or discharge, beside what is known on the third day."""
    table, ill, draw = honest(3)
    outcomes = {
        "death": np.where(draw.random(ROWS) < 0.9, ill, ~ill).astype(int).tolist(),
        "d.time": draw.integers(1, 2000, ROWS).tolist(),
        "slos": draw.integers(3, 90, ROWS).tolist(),
        "discharge": np.where(ill, "home", "ward").tolist(),
    }
    known = {
        "meanbp": [f"{v:.1f}" for v in draw.normal(80, 15, ROWS)],
        "dnrday": draw.integers(1, 30, ROWS).tolist(),
        "scoma": (10 * draw.integers(0, 10, ROWS)).tolist(),
        "hday": draw.integers(1, 20, ROWS).tolist(),
    }
    label = {"hospdead": table.pop("diagnosis")}
    found = survey(write(tmp_path / "t.csv", {**outcomes, **known, **table, **label}), "hospdead").questions
    named = [name for each in found if isinstance(each.value, dict) for name in each.value]
    assert sorted(named) == sorted(outcomes)


@pytest.mark.parametrize("kind", ["difference", "product"])
def test_two_columns_that_tell_together_are_asked_about(tmp_path: Path, kind: str) -> None:
    table, ill, draw = honest()
    one = draw.normal(0, 3, ROWS)
    size = np.where(ill, 1.0, -1.0) * (0.4 + draw.random(ROWS))
    other = one + size if kind == "difference" else size / np.where(np.abs(one) < 0.2, 0.2, one)
    added = {"first date": [f"{v:.3f}" for v in one], "second date": [f"{v:.3f}" for v in other]}
    found = asked(write(tmp_path / "t.csv", {**added, **table}))
    assert len(found) == 1 and "'first date' and 'second date' together tell" in found[0]


def test_names_of_outcomes_are_asked_about() -> None:
    for name in (
        "death",
        "d.time",
        "discharge",
        "slos",
        "hospital_death",
        "Entlassungsdatum",
        "dischargeDate",
    ):
        assert is_outcome(name), name
    for name in ("age", "dose", "closed", "total", "lossy", "time", "status", "methods", "meandeath"):
        assert not is_outcome(name), name


def tidy_tables() -> dict[str, dict[str, Sequence[Any]]]:
    found: dict[str, dict[str, Sequence[Any]]] = {}
    for name, load in (
        ("iris", datasets.load_iris),
        ("wine", datasets.load_wine),
        ("breast", datasets.load_breast_cancer),
    ):
        bunch: Any = load()
        order = np.random.default_rng(0).permutation(len(bunch.target))
        columns = {str(c): bunch.data[order, i].tolist() for i, c in enumerate(bunch.feature_names)}
        found[name] = columns | {"label": bunch.target_names[bunch.target[order]].tolist()}
    for seed in range(3):
        found[f"honest {seed}"] = honest(seed)[0]
    table, ill, draw = honest(7, 900)
    # hospital C treats the ill and measures no troponin: over all rows it is missing for them
    site = np.where(
        draw.random(900) < np.where(ill, 0.8, 0.1), "C", np.where(draw.random(900) < 0.5, "A", "B")
    )
    troponin = ["" if s == "C" else f"{v:.2f}" for s, v in zip(site, draw.normal(ill, 1, 900), strict=True)]
    found["a hospital that measures less"] = {"troponin": troponin, "hospital": site.tolist(), **table}
    few, _, draw = honest(8, 200)
    found["half empty"] = few | {"crp": [f"{v:.1f}" if draw.random() < 0.5 else "" for v in range(200)]}
    return found


@pytest.mark.parametrize("name", list(tidy_tables()))
def test_a_tidy_table_is_asked_about_nothing(tmp_path: Path, name: str) -> None:
    assert asked(write(tmp_path / "t.csv", tidy_tables()[name])) == []
