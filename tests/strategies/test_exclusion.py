"""Flagged sites are excluded only where honest ones are known to be flagged rarely."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from perennial.benchmarks.detection_fairness import RESULT, measured
from perennial.foundation.errors import ConfigError
from perennial.strategies.contribution import Contribution
from perennial.strategies.factory import build_strategy
from perennial.strategies.serial_ring import SerialRing
from perennial.strategies.valuation import exclusion
from perennial.strategies.valuation.exclusion import MEASURED, FederationShape, Measured, heterogeneity
from tests.ring_grid import ScriptedGrid, adds, request, services

CELLS = (
    Measured(8, False, 0.3, 0.009),
    Measured(8, False, 0.6, 0.02),
    Measured(20, False, 0.4, 0.008),
    Measured(20, False, 0.8, 0.009),
    Measured(8, True, 0.9, 0.001),
    Measured(20, True, 0.9, 0.001),
)


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exclusion, "MEASURED", CELLS)


def federation(counts: Sequence[Sequence[int | None]]) -> FederationShape:
    found = FederationShape()
    for number, held in enumerate(counts):
        found.add(f"site-{number}", held)
    return found


def differing(sites: int, distance: float) -> FederationShape:
    """Each site holds more of a class of its own, until its shares are so far from the mean of all."""
    others = round((1e7 / sites) * (1 - distance * sites / (sites - 1)))
    own = 10**7 - others * (sites - 1)
    return federation([[own if label == site else others for label in range(sites)] for site in range(sites)])


def test_heterogeneity_by_hand() -> None:
    assert heterogeneity([[5, 5], [10, 10]]) == 0.0
    # shares (1, 0), (0, 1), (1/2, 1/2) beside their mean (1/2, 1/2): distances 1/2, 1/2, 0
    assert heterogeneity([[4, 0], [0, 9], [1, 1]]) == 0.5
    # four sites with a class each: 1 - 1/4
    assert heterogeneity([[3, 0, 0, 0], [0, 1, 0, 0], [0, 0, 8, 0], [0, 0, 0, 2]]) == 0.75
    assert differing(8, 0.25).heterogeneity == pytest.approx(0.25)


def test_one_site_that_lies_moves_it_little_whatever_it_claims() -> None:
    honest = [[1000, 0], [0, 1000]] * 4
    true = federation(honest).heterogeneity
    for lie in ([10**9, 10**9], [10**9, 0], [1, 0]):
        told = federation([lie, *honest[1:]]).heterogeneity
        assert true is not None and told is not None and abs(told - true) <= 1 / 8


def test_counts_of_all_turns_count_and_withheld_ones_are_none() -> None:
    found = FederationShape()
    for held in ([2, None], [0, 1, 3], ()):
        found.add("a", held)
    assert found.state_dict() == {"a": [2, 1, 3]}
    assert FederationShape().heterogeneity is None
    resumed = FederationShape()
    resumed.load_state_dict(json.loads(json.dumps(found.state_dict())))
    assert resumed == found


@pytest.mark.usefixtures("cells")
@pytest.mark.parametrize(
    ("sites", "share", "increments", "reason"),
    [
        (8, 0.2, False, ""),
        (8, 0.3, False, ""),
        (
            8,
            0.31,
            False,
            "of 8 sites whose classes differ by up to 0.31, 2.0% of the honest ones may be flagged",
        ),
        (8, 0.7, False, "more than in any federation of 8 sites"),
        # between two sizes that were counted both must allow it
        (12, 0.2, False, ""),
        (12, 0.5, False, "of 8 sites whose classes differ by up to 0.50"),
        (20, 0.5, False, ""),
        (20, 0.9, False, "more than in any federation of 20 sites"),
        (8, 0.7, True, ""),
        (4, 0.0, False, "found 4 sites; allowed 8 to 20"),
        (22, 0.0, False, "found 22 sites; allowed 8 to 20"),
    ],
)
def test_whom_the_measured_rates_allow_to_exclude(
    sites: int, share: float, increments: bool, reason: str
) -> None:
    refused = differing(sites, share).refusal(sites, increments=increments)
    assert (reason in refused) if reason else refused == ""


def test_runs_of_a_kind_that_was_not_counted_exclude_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exclusion, "MEASURED", CELLS[:4])
    refused = differing(8, 0.0).refusal(8, increments=True)
    assert refused == "found several tasks; wrong accusations were not counted in such runs"


@pytest.mark.usefixtures("cells")
def test_nobody_is_excluded_while_half_of_the_sites_have_told_nothing() -> None:
    refused = differing(4, 0.0).refusal(8, increments=False)
    assert refused == "4 of 8 sites have told their label counts; allowed with more than half of them"
    assert differing(5, 0.0).refusal(8, increments=False) == ""


def flagged(names: str) -> tuple[Contribution, list[str]]:
    """A ring with a free rider that is flagged in round 5, and the warnings of seven rounds."""
    strategy = Contribution(SerialRing(segments=1, relabel="none"), on_flag="exclude")
    strategy.attach(services(data={"source": "digits", "sites": 8}))
    grid = ScriptedGrid({name: adds(1.0) for name in names} | {"rider": adds(0.0)})
    warnings: list[str] = []
    for number in range(1, 8):
        warnings += strategy.train_round(grid, request(grid, number)).warnings
    return strategy, warnings


def test_a_flagged_site_is_excluded_where_it_was_counted() -> None:
    strategy, warnings = flagged("abcdefg")
    assert strategy.summary_blocks()["valuation"]["excluded"] == ["rider"]
    assert not any("still asked" in text for text in warnings)


def test_where_it_was_not_counted_the_site_is_still_asked_and_the_reason_is_said_once() -> None:
    strategy, warnings = flagged("abc")
    valuation = strategy.summary_blocks()["valuation"]
    assert valuation["excluded"] == []
    assert strategy.summary_blocks()["contribution"]["rider"]["flag"] == "null update"
    said = [text for text in warnings if "on_flag" in text]
    assert said == [
        "strategy.on_flag exclude: flagged sites are still asked: found 4 sites; allowed 8 to 20, "
        "among which wrong accusations were counted in runs of one task"
    ]


def test_heterogeneity_is_in_the_summary() -> None:
    # the scripted sites all hold samples of one class
    assert flagged("abc")[0].summary_blocks()["valuation"]["heterogeneity"] == 0.0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data": {"source": "digits", "sites": 5}}, "found 5 sites; allowed 8 to 20"),
        ({"data": {"source": "digits", "sites": 21}}, "found 21 sites; allowed 8 to 20"),
        ({"bounds": {"norm_multiple": 2.0}}, r"found bounds\.norm_multiple 2, .* allowed 3 and more"),
        (
            {
                "privacy": {
                    "mode": "client_local",
                    "clip_norm": 1.0,
                    "noise_multiplier": 1.0,
                    "delta": 1e-5,
                }
            },
            "found privacy, under which",
        ),
    ],
)
def test_what_was_not_counted_is_refused_before_the_first_round(changes: dict[str, Any], reason: str) -> None:
    changes = {"data": {"source": "digits", "sites": 8}, "evaluation": {"federated": False}} | changes
    with pytest.raises(ConfigError, match=rf"strategy\.on_flag exclude: {reason}"):
        Contribution(SerialRing(segments=1), on_flag="exclude").attach(services(**changes))


def test_sites_that_measure_themselves_exclude_nobody() -> None:
    lent = replace(services(data={"source": "digits", "sites": 8}), judge=None)
    with pytest.raises(ConfigError, match="found no held-out samples at the server"):
        Contribution(SerialRing(), on_flag="exclude").attach(lent)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"false_alarm": 0.05}, "false_alarm 0.05 and least_sweeps 5; allowed with at most 0.01"),
        ({"least_sweeps": 2}, "least_sweeps 2; allowed with at most 0.01 and at least 5"),
        ({"utility": "accuracy"}, "utility 'accuracy'; allowed with 'probability'"),
    ],
)
def test_rules_that_were_not_counted_exclude_nobody(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build_strategy("contribution", {"base": "serial_ring", "on_flag": "exclude", **settings})


def test_the_rates_are_those_of_the_committed_runs() -> None:
    runs = [json.loads(line) for line in RESULT.read_text().splitlines()]
    assert tuple(measured(runs)) == MEASURED
