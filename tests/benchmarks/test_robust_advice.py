"""The recommendation of docs/threat_model.md follows from the tables of adaptive attackers."""

from typing import Any

import pytest

from benchmarks.robust_advice import DEFAULT, by_row, cell, lost, robust, verdict
from benchmarks.tables.robust import RULES

SEEDS = (1, 2, 3)


def runs(**kept: tuple[float, float]) -> list[dict[str, Any]]:
    """90 without attack, 50 and every trigger under one; kept: rule -> (accuracy, triggers) under attacks."""
    found = []
    for rule in RULES:
        accuracy, works = kept.get(rule.replace(" ", "_"), (0.5, 1.0))
        for attack, value in (("none", 0.9), ("loss", accuracy), ("backdoor", 0.9)):
            for seed in SEEDS:
                measures = {"final accuracy": value + 0.01 * seed, "attack success": works}
                found.append({"row": f"{rule}: {attack}", "seed": seed, "measures": measures})
    return found


def test_a_rule_within_both_limits_in_both_divisions_is_recommended() -> None:
    text = " ".join(robust(lambda table: runs(median=(0.88, 0.05))).split())
    assert "**Use median**: its worst attacks cost 2.0 points and 5 % of the triggers." in text
    assert f"The {DEFAULT.replace(',', ' with')}: 40.0 points and 100 %." in text


@pytest.mark.parametrize("uneven", [(0.86, 0.05), (0.88, 0.11)])
def test_one_division_in_which_it_fails_is_enough_to_say_that_nothing_helps(
    uneven: tuple[float, float],
) -> None:
    def read(table: str) -> list[dict[str, Any]]:
        return runs(median=uneven if table.endswith("uneven") else (0.9, 0.0))

    text = " ".join(robust(read).split())
    assert "**No rule helps within 3 points and 10 % of the triggers.**" in text
    assert "Least accuracy is lost with median" in text and "fewest triggers work with median" in text


def test_nothing_is_recommended_while_a_row_is_missing() -> None:
    def read(table: str) -> list[dict[str, Any]]:
        return [run for run in runs(median=(0.9, 0.0)) if run["row"] != "trimmed mean: backdoor"]

    assert "**Nothing is recommended yet:** not every attack was run on trimmed mean." in " ".join(
        robust(read).split()
    )
    assert "Nothing is recommended" in robust(lambda table: [])
    assert verdict({}).startswith("**Nothing")


def test_losses_are_paired_by_seed_with_the_mean_that_nobody_attacks() -> None:
    accuracy = {f"{DEFAULT}: none": {1: 90.0, 2: 80.0}, "median: loss": {2: 79.0, 3: 10.0}}
    assert lost(accuracy, "median", "loss") == pytest.approx(1.0)
    assert lost(accuracy, "median", "backdoor") is None


def test_what_a_run_did_not_measure_is_left_out() -> None:
    measured = [
        {"row": "a", "seed": 1, "measures": {"x": 0.5}},
        {"row": "a", "seed": 2, "measures": {"x": float("nan")}},
        {"row": "b", "seed": 1, "measures": {}},
    ]
    assert by_row(measured, "x") == {"a": {1: 50.0}}
    assert cell({1: 50.0}) == "50.0, one seed" and cell(None) == "not run"
