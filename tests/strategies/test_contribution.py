"""Contribution values by hand: a model is worth the sum of its parameters, so a site that adds a to each of
the three gives 3 a."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from perennial.foundation.errors import ConfigError
from perennial.strategies.contribution import Contribution
from perennial.strategies.factory import build_strategy
from perennial.strategies.round.request import Arrays
from perennial.strategies.serial_ring.method import SerialRing
from tests.strategies.ring_grid import START, ScriptedGrid, adds, request, services

RING: Mapping[str, Any] = {"segments": 1, "reshuffle": "never", "relabel": "none"}


def valued(base: SerialRing | None = None, **settings: Any) -> Contribution:
    strategy = Contribution(base or SerialRing(**RING), **settings)
    strategy.attach(services())
    return strategy


WARNINGS: list[str] = []
"""Of the latest rounds that were played."""


def rounds(strategy: Contribution, grid: ScriptedGrid, count: int) -> Arrays:
    arrays: Arrays = START
    WARNINGS.clear()
    for number in range(1, count + 1):
        outcome = strategy.train_round(grid, request(grid, number, arrays))
        assert outcome.arrays is not None
        arrays = outcome.arrays
        WARNINGS.extend(outcome.warnings)
    return arrays


def shares(strategy: Contribution) -> dict[str, dict[str, Any]]:
    return strategy.summary_blocks()["contribution"]


def test_online_values_are_what_each_turn_added_and_sum_to_the_gain() -> None:
    strategy = valued(SerialRing(**{**RING, "reshuffle": "sweep", "segments": 2}))
    grid = ScriptedGrid({"a": adds(1.0), "b": adds(3.0), "c": adds(0.0), "d": adds(-0.5)})
    end = rounds(strategy, grid, 3)
    block = shares(strategy)
    assert {site: entry["value"] for site, entry in block.items()} == {"a": 18, "b": 54, "c": 0, "d": -9}
    gain = sum(float(tensor.sum()) for tensor in end.values()) - 3.0
    assert sum(entry["value"] for entry in block.values()) == pytest.approx(gain, abs=1e-12)
    assert block["a"]["share"] == pytest.approx(18 / 63)
    assert block["c"]["share"] == 0.0
    assert block["b"]["low"] == pytest.approx(block["b"]["high"]), "equal sweeps have no spread"


def test_who_sends_back_what_it_got_is_flagged_and_nobody_else_is() -> None:
    """A site that lowers the model's worth is valued below 0, and not accused: an unusual one does so too."""
    strategy = valued()
    grid = ScriptedGrid({"a": adds(1.0), "b": adds(2.0), "rider": adds(0.0), "lowers": adds(-1.0)})
    rounds(strategy, grid, 4)
    assert all(entry["flag"] is None for entry in shares(strategy).values()), "too few updates to say"
    rounds(strategy, grid, 1)
    found = shares(strategy)
    flags = {site: entry["flag"] for site, entry in found.items()}
    assert flags == {"a": None, "b": None, "rider": "null update", "lowers": None}
    assert found["lowers"]["value"] < 0 < found["a"]["value"]
    assert any("site rider: flagged (null update)" in text for text in WARNINGS)
    # a flag excludes nobody, and no site is asked for label counts
    rounds(strategy, grid, 2)
    assert grid.asked.count("rider") == 7
    assert not any("tell" in each.settings for each in grid.seen)


def test_a_round_that_ruins_the_model_is_rolled_back_and_named() -> None:
    strategy = valued(SerialRing(**RING))
    grid = ScriptedGrid({"a": adds(1.0), "b": adds(1.0)})
    arrays = rounds(strategy, grid, 5)
    ruined = ScriptedGrid({"a": adds(1.0), "b": adds(-50.0)})
    outcome = strategy.train_round(ruined, request(ruined, 6, arrays))
    assert outcome.arrays is not None and not outcome.skipped
    assert all(torch.equal(outcome.arrays[name], tensor) for name, tensor in arrays.items())
    assert outcome.details["rolled_back"] is True
    assert any("round 6 is rolled back" in text for text in outcome.warnings)
    assert strategy.summary_blocks()["valuation"]["rounds_rolled_back"] == 1
    # a resumed server goes on with the same memory of what rounds do
    resumed = valued(SerialRing(**RING))
    resumed.load_state_dict(strategy.state_dict())
    assert (
        resumed.state_dict()["contribution"]["rollback"] == strategy.state_dict()["contribution"]["rollback"]
    )


def test_a_resumed_server_knows_what_it_knew() -> None:
    whole, stopped = valued(), valued()
    answers = {name: adds(1.0) for name in "abcdefg"} | {"rider": adds(0.0)}
    rounds(whole, ScriptedGrid(answers), 6)
    arrays = rounds(stopped, ScriptedGrid(answers), 5)
    resumed = valued()
    resumed.load_state_dict(stopped.state_dict())
    grid = ScriptedGrid(answers)
    resumed.train_round(grid, request(grid, 6, arrays))
    assert shares(resumed) == shares(whole)
    for block in ("ring", "contribution"):
        assert resumed.summary_blocks()[block] == whole.summary_blocks()[block]
    assert shares(resumed)["rider"]["flag"] == "null update"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"base": "fedavg"}, "base: found FedAvg; allowed: serial_ring"),
        ({"base": "serial_ring", "on_flag": "exclude"}, "on_flag"),
        ({"base": "serial_ring", "every": 0}, "every: found 0, allowed 1"),
    ],
)
def test_settings_that_cannot_be_valued_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build_strategy("contribution", settings)


def test_a_server_without_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match="no held-out samples at the server"):
        Contribution(SerialRing(), utility="probability").attach(replace(services(), judge=None))
    silent = services(evaluation={"federated": False})
    with pytest.raises(ConfigError, match=r"evaluation\.federated false"):
        Contribution(SerialRing()).attach(replace(silent, judge=None))
