"""The suite of unusual honest sites deals what it says, and its page counts by division."""

from typing import Any

import pytest
import torch

from benchmarks.honest_hospitals import (
    FEW,
    HABITS,
    LEAST,
    LOOKS,
    MANY,
    MISSING,
    OWN,
    Division,
    Records,
    dealt,
    marks,
    row,
)

DIVISION = Division(7, 4, 1.0)


def records() -> Records:
    """Six classes of which each has its own patch of bright pixels."""
    draws = torch.Generator().manual_seed(3)
    y = torch.arange(900) % 6
    x = torch.randint(0, 60, (900, 1, 8, 8), generator=draws)
    for label in range(6):
        x[y == label, :, label] += 150
    return Records(x.to(torch.uint8), y)


def test_nobody_shares_a_record_and_test_records_are_nobodys() -> None:
    parts, test, theirs = dealt(records(), DIVISION, "nobody")
    assert sum(len(part.y) for part in parts) + len(test.y) == 900 and len(test.y) == 180
    assert len(theirs.y) <= len(test.y)


@pytest.mark.parametrize("kind", LOOKS)
def test_another_look_changes_the_last_sites_pixels_and_its_test_records_alone(kind: str) -> None:
    usual, _, theirs = dealt(records(), DIVISION, "nobody")
    parts, test, own = dealt(records(), DIVISION, kind)
    assert all(torch.equal(parts[k].x, usual[k].x) for k in range(3))
    assert torch.equal(parts[3].x, LOOKS[kind](usual[3].x)) and not torch.equal(parts[3].x, usual[3].x)
    assert torch.equal(own.x, LOOKS[kind](theirs.x)) and torch.equal(own.y, theirs.y)
    assert parts[3].x.shape == usual[3].x.shape and parts[3].x.dtype == torch.uint8
    assert torch.equal(parts[3].y, usual[3].y) and test.x.dtype == torch.uint8


def test_classes_and_counts_of_the_last_site() -> None:
    usual, _, _ = dealt(records(), DIVISION, "nobody")
    own, _, _ = dealt(records(), DIVISION, OWN)
    others = torch.cat([part.y for part in own[:-1]]).unique()
    assert len(others) == 5 and len(own[-1].y.unique()) >= len(usual[-1].y.unique())
    lacking, _, theirs = dealt(records(), DIVISION, MISSING)
    gone = set(usual[-1].y.tolist()) - set(lacking[-1].y.tolist())
    assert len(gone) == 1 and not gone & set(theirs.y.tolist())
    few, _, _ = dealt(records(), DIVISION, FEW)
    assert len(few[-1].y) == LEAST == 10
    many, _, _ = dealt(records(), DIVISION, MANY)
    assert min(len(many[-1].y) / len(part.y) for part in many[:-1]) >= 95
    habits, _, _ = dealt(records(), DIVISION, HABITS)
    changed = (habits[-1].y != usual[-1].y).nonzero().flatten()
    (special,) = usual[-1].y[changed].unique().tolist()
    assert len(changed) == max(1, int((usual[-1].y == special).sum()) // 10)


def test_an_inverted_site_is_marked_and_nobody_else_is() -> None:
    parts, _, _ = dealt(records(), Division(7, 5, 100.0), "inverted")
    assert {site for after in marks(parts, 1) for site in after} == {"site-4"}
    usual, _, _ = dealt(records(), Division(7, 5, 100.0), "nobody")
    assert marks(usual, 1) == [[], [], []]


def line(left: list[str], own: float, free: float, marked: list[list[str]]) -> dict[str, Any]:
    return {
        "sites": 4,
        "bounded": {"left out": left, "own": own, "last bounded": True},
        "free": {"own": free},
        "marks": marked,
    }


def test_each_division_counts_once_whatever_happened_in_it() -> None:
    lines = [
        line([], 0.80, 0.84, [["site-3"], ["site-3", "site-0"]]),
        line(["site-1", "site-2"], 0.90, 0.90, [[], []]),
        line([], 0.70, 0.69, [["site-1"], []]),
        line([], 0.60, 0.60, [[], []]),
    ]
    cells = [cell.strip() for cell in row("dim", lines).strip("|").split("|")]
    assert cells[0] == "dim" and cells[1].startswith("1 of 4 (") and cells[2] == "4"
    assert cells[3:6] == ["75.0", "75.8", "+4.0"]
    assert cells[6].startswith("1 of 4") and cells[7].startswith("1 of 4") and cells[8].startswith("2 of 4")
