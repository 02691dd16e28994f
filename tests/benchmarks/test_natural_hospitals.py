"""Hospitals as they are: folds, the worst beside each mean, and pictures that a user brings."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.blood_cells import SIDE, convert, kind_of
from benchmarks.natural_hospitals import (
    NAME,
    TOGETHER,
    arrangements,
    experiments,
    federation,
    page,
    reduced,
    run_one,
    settings_of,
)
from benchmarks.natural_places import PLACES, SHARED, Place, heart
from benchmarks.table import RESULTS
from perennial.foundation.errors import DataError

FLAMBY = {"Cleveland": (199, 104), "Hungarian": (172, 89), "Switzerland": (30, 16), "VA Long Beach": (85, 45)}


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data")
def test_heart_disease_has_flambys_fold(tmp_path: Path) -> None:
    heart(tmp_path / "heart.npz")
    with np.load(tmp_path / "heart.npz") as found:
        sites, held = found["site"], found["site_test"]
        assert found["x"].shape == (486, 13) and found["x_test"].shape == (254, 13)
        assert set(found["y"]) == {"healthy", "diseased"}
    assert {name: (int((sites == name).sum()), int((held == name).sum())) for name in FLAMBY} == FLAMBY


def _three(path: Path) -> None:
    """Two hospitals that agree, and an honest one whose measurements have another sign."""
    draws = np.random.default_rng(3)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ("x", "y", "site")}
    for site, sign in (("north", 1), ("south", 1), ("odd", -1)):
        y = np.arange(60) % 2
        parts["x"].append((draws.normal(0, 0.3, (60, 4)) + sign * (2 * y[:, None] - 1)).astype(np.float32))
        parts["y"].append(np.array(["no", "yes"])[y])
        parts["site"].append(np.array([site] * 60))
    whole = {name: np.concatenate(values) for name, values in parts.items()}
    np.savez(path, **whole, **{f"{name}_test": values for name, values in whole.items()})  # type: ignore[arg-type]


def test_a_hospital_that_differs_is_the_worst_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.natural_places.MADE", tmp_path)
    models = ({"features": [{"name": "inputs"}]}, {"features": [{"name": "inputs"}]})
    place = Place("three", "Three", _three, {"partition": {"kind": "natural"}}, models)
    place.make(place.path)
    tests = federation(experiments(place, ())[TOGETHER], 1)
    rows = experiments(place, tests.site_names)
    assert "averaging" not in rows and {"without odd", "odd alone", "together, epsilon 2"} <= rows.keys()
    mean, worst, _, name = reduced(run_one(rows["without odd"], 1, tests), "accuracy")
    assert name == "odd" and worst < 0.1 and mean > 0.6
    assert reduced(run_one(rows["odd alone"], 1, tests), "accuracy")[1] < 0.1
    assert settings_of(rows[TOGETHER], 1) != settings_of(rows[TOGETHER], 2)


def _line(row: str, **accuracy: float) -> dict[str, object]:
    hospitals = {name: {"accuracy": a, "balanced": a, "records": 10} for name, a in accuracy.items()}
    facts = {"seconds": 1.0, "machine": "m", "settings": row}
    return {"place": PLACES[0].name, "row": row, "seed": 1000, "hospitals": hospitals, **facts}


def test_each_hospital_is_judged_by_the_model_that_never_saw_it_or_by_its_own() -> None:
    lines = [
        _line(TOGETHER, a=0.9, b=0.7),
        *(_line("without a", a=0.5, b=0.8), _line("without b", a=0.9, b=0.4)),
        *(_line("a alone", a=0.6, b=0.1), _line("b alone", a=0.2, b=0.8)),
    ]
    found = {name: [reduced(each, "accuracy")[:2] for each in seeds] for name, seeds in arrangements(lines)}
    assert found[TOGETHER] == [(pytest.approx(0.8), 0.7)]
    assert found["all others, at the one that is left out"] == [(pytest.approx(0.45), 0.4)]
    assert found["each alone, at its own records"] == [(pytest.approx(0.7), 0.6)]
    assert "| all others, at the one that is left out | 45.0 | 40.0 (b) | 45.0 |" in page(PLACES, lines)


def test_the_page_is_kept_with_its_runs() -> None:
    lines = [json.loads(line) for line in (RESULTS / f"{NAME}.jsonl").read_text().splitlines()]
    assert (RESULTS / f"{NAME}.md").read_text() == page(PLACES, lines)


def _picture(path: Path, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (50, 40), (shade, 0, 0)).save(path)


def test_blood_cells_of_two_laboratories_become_one_file(tmp_path: Path) -> None:
    _picture(tmp_path / "a" / "train" / "Neutrophils" / "1.png", 10)
    _picture(tmp_path / "a" / "EOSINOPHIL" / "2.jpg", 20)
    _picture(tmp_path / "b" / "LYT" / "3.tiff", 30)
    _picture(tmp_path / "b" / "erythroblast" / "4.png", 40)
    counts = convert({"a": tmp_path / "a", "b": tmp_path / "b"}, tmp_path / "out" / "cells.npz")
    assert counts["b"] == {"lymphocyte": 1, "erythroblast": 1}
    with np.load(tmp_path / "out" / "cells.npz") as found:
        assert found["x"].shape == (3, SIDE, SIDE, 3) and found["x"].dtype == np.uint8
        assert sorted(zip(found["site"].tolist(), found["y"].tolist(), strict=True)) == [
            *(("a", "eosinophil"), ("a", "neutrophil"), ("b", "lymphocyte")),
        ]
    assert kind_of("platelet") is None


def test_a_laboratory_without_known_cells_or_with_a_damaged_picture_is_named(tmp_path: Path) -> None:
    _picture(tmp_path / "a" / "stone" / "1.png", 10)
    with pytest.raises(DataError, match=r"first: .* holds no folder of basophil.*found stone"):
        convert({"first": tmp_path / "a"}, tmp_path / "out.npz")
    (tmp_path / "b" / "monocyte").mkdir(parents=True)
    (tmp_path / "b" / "monocyte" / "2.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"2\.png: not a picture"):
        convert({"second": tmp_path / "b"}, tmp_path / "out.npz")
