"""Sub-rings side by side: who hands on to whom, the mean of their models, failures, bounds, a whole run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perennial.baselines.parallel_rings import ParallelRings, mean_model
from perennial.config.bounds import BoundsConfig
from perennial.config.run import APP_ROOT, RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError
from perennial.strategies.round.running_bounds import RunningBounds
from tests.ring_grid import START, ScriptedGrid, adds, doubles_and_adds, refuses, request, services


def rings(number: int = 2, reshuffle: Any = "never") -> ParallelRings:
    strategy = ParallelRings(number, reshuffle)
    strategy.attach(services())
    return strategy


def head(arrays: Any) -> float:
    return float(arrays["head.weight"])


def test_each_sub_ring_hands_its_own_model_on_and_the_round_ends_with_their_mean() -> None:
    grid = ScriptedGrid({site: doubles_and_adds(k) for k, site in enumerate("abcde")})
    outcome = rings().train_round(grid, request(grid))
    # a, c, e: 2 -> 4 -> 2*4+2 = 10 -> 2*10+4 = 24; b, d: 2 -> 5 -> 13; of 30 and 20 samples
    assert outcome.details["rings"] == [["a", "c", "e"], ["b", "d"]]
    assert outcome.arrays is not None and head(outcome.arrays) == pytest.approx(0.6 * 24 + 0.4 * 13)
    # both sub-rings are asked before either goes on
    assert grid.asked == ["a", "b", "c", "d", "e"]
    assert [head(seen.arrays) for seen in grid.seen] == [2, 2, 4, 5, 10]
    assert list(outcome.participants) == ["a", "b", "c", "d", "e"]


def test_one_sub_ring_is_a_ring_and_as_many_as_sites_are_averaging() -> None:
    grid = ScriptedGrid({"a": doubles_and_adds(1), "b": doubles_and_adds(10), "c": doubles_and_adds(100)})
    one = rings(1).train_round(grid, request(grid)).arrays
    assert one is not None and head(one) == 140
    three = rings(3).train_round(grid, request(grid)).arrays
    assert three is not None and head(three) == pytest.approx((5 + 14 + 104) / 3)


def test_a_site_that_fails_is_skipped_and_its_sub_ring_goes_on() -> None:
    grid = ScriptedGrid({"a": refuses, "b": lambda request: None, "c": adds(1), "d": adds(2)})
    outcome = rings().train_round(grid, request(grid))
    assert outcome.arrays is not None and head(outcome.arrays) == pytest.approx((3 + 4) / 2)
    assert outcome.refused == [("a", "data: no samples")] and outcome.absent == ["b"]


def test_a_sub_ring_whose_sites_all_fail_does_not_count_and_a_round_without_any_is_skipped() -> None:
    grid = ScriptedGrid({"a": refuses, "b": adds(4)})
    arrays = rings().train_round(grid, request(grid)).arrays
    assert arrays is not None and head(arrays) == 6
    grid = ScriptedGrid({"a": refuses, "b": refuses})
    assert rings().train_round(grid, request(grid)).skipped


def test_a_boosted_turn_is_bounded_by_the_turns_so_far() -> None:
    strategy = rings()
    grid = ScriptedGrid({site: adds(1000.0 if site == "d" else 1.0) for site in "abcd"})
    bounds = RunningBounds(BoundsConfig(), {})
    outcome = strategy.train_round(grid, replace(request(grid), running=bounds))
    assert outcome.participants["d"].scaled and "bounds.norm_multiple" in outcome.warnings[0]
    assert outcome.arrays is not None and head(outcome.arrays) < 6


def test_the_order_is_drawn_anew_in_each_round_and_repeats() -> None:
    grid = ScriptedGrid({site: adds(1) for site in "abcdef"})
    orders = [rings(reshuffle="round").order(request(grid, round)) for round in (1, 2, 3, 1)]
    assert orders[0] == orders[3] and len({json.dumps(order) for order in orders}) == 3
    assert all(sorted(site for ring in order for site in ring) == list("abcdef") for order in orders)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="rings: found 0"):
        ParallelRings(0)
    with pytest.raises(ConfigError, match="strategy.rings: found 4, allowed 1 to 3"):
        ParallelRings(4).attach(services())
    with pytest.raises(ValueError, match="weights"):
        mean_model(START, [START], [0.0])


def test_a_run_repeats_to_the_bit(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        overrides = ["strategy={name: parallel_rings, rings: 3}", "tasks.rounds=2", "data.sites=6"]
        settings = RunSettings(
            experiment=str(APP_ROOT / "experiments" / "tricon_sf_digits.yaml"),
            overrides=json.dumps(overrides),
            runs=str(tmp_path / name),
            device="cpu",
        )
        found.append(run_in_process(settings))
    assert found[0]["model_sha256"] == found[1]["model_sha256"]
    assert found[0]["final_accuracy"] > 0.3
