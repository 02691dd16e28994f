"""Seeds that would decide a claim are counted from its own, and what is taken off goes on counting."""

import json
from math import inf
from pathlib import Path

import numpy as np
import pytest

from benchmarks.intervals import holm
from benchmarks.paper_claims import Claim, judge
from benchmarks.power import Estimate, decisions, page, seeds_needed


def test_so_many_seeds_find_the_mean_as_often_as_promised() -> None:
    needed = seeds_needed(2.0, 2.0, 0.0, tests=10)
    draws = np.random.default_rng(5).normal(2.0, 2.0, (2000, int(needed)))
    found = [
        bool(interval.low > 0)
        for key, interval in (
            (row, holm({0: (values, 0.0)}, tested=10)[0]) for row, values in enumerate(draws.tolist())
        )
    ]
    assert 0.77 < np.mean(found) < 0.86


@pytest.mark.parametrize(("mean", "margin"), [(1.0, 1.0), (0.01, 0.0)])
def test_a_mean_at_its_margin_is_never_decided(mean: float, margin: float) -> None:
    assert seeds_needed(mean, 3.0, margin, tests=10) == inf


def test_claims_that_were_taken_off_count_in_the_correction() -> None:
    claim = Claim("c", "a", "b", "m")
    runs = [
        {"row": row, "seed": seed, "measures": {"m": share}}
        for seed, gain in enumerate((0.02, 0.03, 0.01, 0.035, 0.02))
        for row, share in (("a", 0.5 + gain), ("b", 0.5))
    ]
    assert judge([(claim, runs)])[0].word == "holds"
    assert judge([(claim, runs)], tested=100)[0].word == "undecided"


def test_the_page_says_what_becomes_of_each_claim() -> None:
    cheap = Estimate("t", "cheap", "undecided", 2.0, 1.0, 5, 12, 1.0)
    dear = Estimate("t", "dear", "undecided", 0.1, 1.0, 5, inf, inf)
    held = Estimate("t", "held", "holds", 9.0, 1.0, 5, 4, 1.0)
    text = page([dear, cheap, held])
    assert "2 of 3 claims are undecided" in text and "1 claims get them" in text
    assert "| 12 | 1.0 | more seeds |" in text and "| inf | inf | taken off |" in text and "held" not in text


def test_decisions_are_read_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "power.json").write_text(
        json.dumps(
            [vars(Estimate("t", "c", "undecided", 0.0, 1.0, 5, 7, 1.0)) | {"needed": None, "minutes": -1.0}]
        )
    )
    [found] = decisions(tmp_path).values()
    assert found.needed == inf and found.decision == "taken off"
    assert decisions(tmp_path / "nowhere") == {}
