"""The page of the first model says how often prediction sets held each class."""

from pathlib import Path

import pytest

from benchmarks import first_model
from perennial.server.measures.figure import wilson


def test_shares_of_prediction_sets_are_of_all_judged_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_model, "PAGE", tmp_path / "page.md")
    name, other = list(first_model.SETS)[:2]
    same = {"set": name, "asked": 0.9, "classes": 3, "void": ""}
    first_model.write_page(
        [
            same | {"seed": 1000, "held": {"a": [30, 20, 0.9], "b": [12, 10, 0.7]}, "mean_size": 1.5},
            same | {"seed": 1001, "held": {"a": [31, 20, 1.0], "b": [11, 10, 0.9]}, "mean_size": 2.5},
            same | {"set": other, "seed": 1000, "held": {}, "mean_size": 3.0},
        ]
    )
    page = (tmp_path / "page.md").read_text()
    # of a 18 and 20 of 20 each, of b 7 and 9 of 10 each: 54 of 60, and b least often
    figure = wilson(54, 60)
    assert figure.low is not None and figure.high is not None
    held = f"90.0 [{100 * figure.low:.1f}, {100 * figure.high:.1f}]"
    assert f"| {name} | 1000, 1001 | 2 of 3 | 60 | {held} | 80.0 of 20 | 2.0 |" in page
    assert f"| {other} | 1000 | 0 of 3 | 0 | none |  | 3.0 |" in page
    assert f"Not run with prediction sets yet: {list(first_model.SETS)[2]}" in page
    assert f"Not run yet: {name}; {other};" in page
