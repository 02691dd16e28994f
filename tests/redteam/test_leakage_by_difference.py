"""What two releases tell of one record: a site that demands a protection refuses them, or charges them."""

import json
from pathlib import Path

import pytest

from benchmarks.leakage_by_difference import (
    ATTACKS,
    CASES,
    CLEAR,
    DEMAND,
    NOISE,
    OPEN,
    RESULTS,
    of_one_withdrawn,
    of_two_sums,
    page,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERENNIAL_CACHE", str(tmp_path / "cache"))


def test_growth_by_one_record_gives_it_in_the_clear_and_is_refused_or_charged(tmp_path: Path) -> None:
    clear = of_two_sums(OPEN | {"min_samples": 20}, CLEAR, tmp_path / "clear")
    assert clear.likeness is not None and clear.likeness > 0.99
    refused = of_two_sums(DEMAND, CLEAR, tmp_path / "refused")
    assert refused.likeness is None and "require_privacy" in refused.refusal and refused.charges == 0
    charged = of_two_sums(DEMAND, NOISE, tmp_path / "charged")
    assert charged.charges == 2
    # the second release would pass the budget of a record that could be in both
    short = of_two_sums(DEMAND | {"max_epsilon": 6.0}, NOISE, tmp_path / "short")
    assert short.charges == 1 and "max_epsilon" in short.refusal


def test_one_record_is_withdrawn_in_the_clear_and_without_a_floor_alone(tmp_path: Path) -> None:
    clear = of_one_withdrawn(OPEN, CLEAR, tmp_path / "clear")
    assert clear.likeness is not None and clear.likeness > 0.99
    for name, (policy, changes, why) in {
        "floor": (OPEN | {"min_samples": 20}, CLEAR, "min_samples"),
        "demanded": (DEMAND, CLEAR, "require_privacy"),
        "noise": (DEMAND, NOISE, "fresh noise"),
    }.items():
        found = of_one_withdrawn(policy, changes, tmp_path / name)
        assert found.likeness is None and why in found.refusal and found.charges == 0


def test_the_recorded_table_is_of_these_cases() -> None:
    content = json.loads(RESULTS.with_suffix(".json").read_text())
    assert RESULTS.with_suffix(".md").read_text() == page(content)
    assert [(row["attack"], row["case"]) for row in content["rows"]] == [
        (attack, case) for attack in ATTACKS for case in CASES
    ]
