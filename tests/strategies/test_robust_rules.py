"""Robust rules: the hand case, any order of arrival, ranges, pieces of any size, as a base of wrappers."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from perennial.config.run import APP_ROOT, RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError, PrivacyError
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.factory import build_strategy
from perennial.strategies.krum import krum_scores
from perennial.strategies.robust_rule import RobustRule, distances_from
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.outcome import RoundOutcome
from perennial.strategies.sums import update_file
from tests.rounds import STAMP, begun

HAND = [(1.0, 2.0), (1.2, 1.8), (0.8, 2.2), (1.1, 2.1), (10.0, -10.0)]
RULES: dict[str, tuple[dict[str, Any], tuple[float, float]]] = {
    "fedavg": ({}, (2.82, -0.38)),
    "median": ({}, (1.1, 2.0)),
    "trimmed_mean": ({"dishonest": 1}, (1.1, 1.966667)),
    "krum": ({"dishonest": 1}, (1.0, 2.0)),
    "multi-krum": ({"dishonest": 1, "chosen": 3}, (1.1, 1.966667)),
    "geometric_median": ({}, (1.037085, 1.997391)),
    "centred_clipping": ({}, (1.148301, 1.283677)),
    "centred_clipping of radius 2.34": ({"radius": 2.340940}, (1.148301, 1.283677)),
    "bucketing of one": ({"base": "median", "size": 1, "dishonest": 2}, (1.1, 2.0)),
}


OUTCOMES: dict[IncrementalStrategy, RoundOutcome] = {}
"""Of the latest round of each strategy."""


def rule(name: str, options: dict[str, Any] | None = None) -> IncrementalStrategy:
    name = {"multi-krum": "krum"}.get(name, name.split(" of ", maxsplit=1)[0])
    return build_strategy(name, options or {})


def aggregate(
    strategy: IncrementalStrategy, updates: Sequence[Tensor], order: Sequence[int] = (), number: int = 1
) -> Tensor:
    """One round; tensors of two shapes hold the values of an update."""
    half = len(updates[0]) // 2
    reference = {"a": torch.zeros(half), "b": torch.zeros(len(updates[0]) - half, 1)}
    round_ = begun(strategy, reference, stamp=replace(STAMP, round=number))
    OUTCOMES[strategy] = round_.ctx.outcome
    for index in order or range(len(updates)):
        update = {"a": updates[index][:half], "b": updates[index][half:, None]}
        round_.add(Admitted(f"site-{index}", update, float(updates[index].norm()), 1))
    if isinstance(strategy, RobustRule):
        assert round_.complete() == len(updates)
    after = round_.result()
    return torch.cat([after["a"], after["b"].flatten()])


@pytest.mark.parametrize("name", RULES)
def test_the_hand_case(name: str) -> None:
    options, expected = RULES[name]
    found = aggregate(rule(name, options), [torch.tensor(update) for update in HAND])
    assert found.tolist() == pytest.approx(expected, abs=2e-6)


def test_the_scores_of_krum() -> None:
    rows = torch.tensor(HAND, dtype=torch.float64)
    scores = krum_scores(torch.cdist(rows, rows).square(), dishonest=1)
    assert scores.tolist() == pytest.approx([0.1, 0.18, 0.18, 0.12, 441.68], abs=1e-9)
    with pytest.raises(ValueError, match=r"from 2 \* 2 \+ 3"):
        krum_scores(torch.zeros(5, 5), dishonest=2)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("sites", [5, 6])
def test_any_order_of_arrival_and_any_size_of_piece_give_the_same_bits(
    name: str, sites: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, _ = RULES[name]
    generator = torch.Generator().manual_seed(sites)
    updates = [torch.randn(41, generator=generator) * 10 ** (index - 2) for index in range(sites)]
    found = aggregate(rule(name, options), updates)
    for order in itertools.islice(itertools.permutations(range(sites)), 5, 120, 23):
        assert torch.equal(aggregate(rule(name, options), updates, order), found)
    if name in ("median", "trimmed_mean"):
        monkeypatch.setattr(update_file, "PIECE_BYTES", 8 * sites * 7)
        assert torch.equal(aggregate(rule(name, options), updates), found)


def test_distances_from_a_mixture_need_distances_between_rows_alone() -> None:
    rows = torch.randn(6, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    point = torch.tensor([0.5, 0.2, 0.0, 0.4, -0.2, 0.1], dtype=torch.float64)
    found = distances_from(point, torch.cdist(rows, rows).square())
    assert torch.allclose(found, (rows - point @ rows).norm(dim=1), atol=1e-9)


def test_the_geometric_median_is_where_the_sum_of_distances_is_least() -> None:
    generator = torch.Generator().manual_seed(4)
    updates = [torch.randn(8, generator=generator) for _ in range(7)]
    found = aggregate(rule("geometric_median"), updates).double()

    def total(point: Tensor) -> float:
        return sum(float((update.double() - point).norm()) for update in updates)

    for _ in range(50):
        step = torch.randn(8, generator=generator, dtype=torch.float64)
        assert total(found) <= total(found + 1e-3 * step / step.norm())


def test_rows_that_lie_on_the_geometric_median_divide_by_nothing() -> None:
    updates = [torch.ones(4)] * 4 + [torch.full((4,), 1e6)]
    assert aggregate(rule("geometric_median"), updates).tolist() == pytest.approx([1.0] * 4, abs=1e-4)


@pytest.mark.parametrize("name", [name for name in RULES if name != "fedavg"])
def test_one_site_however_far_away_does_not_carry_the_others_along(name: str) -> None:
    options, _ = RULES[name]
    honest = [torch.tensor(update) for update in HAND[:4]]
    found = aggregate(rule(name, options), [*honest, torch.tensor([1e30, -1e30])])
    assert float((found - torch.tensor([1.0, 2.0])).norm()) < 1.2


def test_centred_clipping_goes_on_from_the_last_aggregate_and_survives_a_stop() -> None:
    strategy = rule("centred_clipping", {"radius": 0.5})
    updates = [torch.tensor(update) for update in HAND]
    first = aggregate(strategy, updates)
    assert float(first.norm()) <= 0.5 + 1e-6
    resumed = rule("centred_clipping", {"radius": 0.5})
    resumed.load_state_dict(strategy.state_dict())
    second = aggregate(strategy, updates)
    expected = first.double().clone()
    for update in updates:
        apart = update.double() - first.double()
        expected += apart * min(1.0, 0.5 / float(apart.norm())) / 5
    assert second.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert torch.equal(aggregate(resumed, updates), second)


def test_buckets_are_dealt_anew_in_each_round_and_averaged() -> None:
    strategy = rule("bucketing", {"base": "median", "size": 2, "dishonest": 1})
    updates = [torch.tensor(update) for update in HAND] + [torch.tensor([1.0, 2.0])]
    dealt = []
    for number in range(6):
        found = aggregate(strategy, updates, number=number)
        buckets = OUTCOMES[strategy].details["buckets"]
        means = torch.stack(
            [torch.stack([updates[int(site[5:])] for site in bucket]).double().mean(0) for bucket in buckets]
        )
        assert found.tolist() == pytest.approx(means.median(dim=0).values.tolist(), abs=1e-6)
        dealt.append(json.dumps(buckets))
    assert len(set(dealt)) > 1


@pytest.mark.parametrize(
    ("name", "options", "least"),
    [
        ("krum", {"dishonest": 2}, 7),
        ("krum", {"dishonest": 1, "chosen": 6}, 7),
        ("trimmed_mean", {"dishonest": 3}, 7),
        ("bucketing", {"base": "median", "size": 2, "dishonest": 2}, 9),
        ("bucketing", {"base": {"name": "krum", "dishonest": 1}, "size": 2}, 9),
    ],
)
def test_a_federation_outside_the_range_is_refused(name: str, options: dict[str, Any], least: int) -> None:
    strategy = build_strategy(name, options)
    assert isinstance(strategy, RobustRule) and strategy.least_replies() == least
    round_ = begun(strategy, {"a": torch.zeros(1)})
    for index in range(least):
        assert round_.complete() == 0
        round_.add(Admitted(f"site-{index}", {"a": torch.ones(1)}, 1.0, 1))
    assert round_.complete() == least
    assert f"needs {least} updates" in round_.ctx.outcome.warnings[0]


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("krum", {"dishonest": -1}, "dishonest"),
        ("krum", {"chosen": 0}, "chosen"),
        ("trimmed_mean", {"dishonest": -1}, "dishonest"),
        ("geometric_median", {"iterations": 0}, "iterations"),
        ("geometric_median", {"smoothing": 0.0}, "smoothing"),
        ("centred_clipping", {"radius": math.inf}, "radius"),
        ("centred_clipping", {"iterations": 0}, "iterations"),
        ("bucketing", {"base": "fedavg"}, "FedAvg"),
        ("bucketing", {"base": "median", "size": 0}, "size"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(name: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build_strategy(name, options)


@pytest.mark.parametrize("name", [name for name in RULES if name != "fedavg"])
def test_noise_at_the_server_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(PrivacyError, match="chooses among updates"):
        rule(name, RULES[name][0]).largest_weight(4)


def short_run(tmp_path: Path, name: str, strategy: Any, *overrides: str) -> dict[str, Any]:
    settings = RunSettings(
        experiment=str(APP_ROOT / "experiments" / "rivals_digits.yaml"),
        overrides=json.dumps([f"strategy={json.dumps(strategy)}", "tasks.rounds=1", *overrides]),
        runs=str(tmp_path),
        name=name,
        device="cpu",
    )
    return run_in_process(settings)


@pytest.mark.parametrize(
    "strategy",
    [
        {"name": "krum", "dishonest": 1, "chosen": 2},
        {"name": "bucketing", "base": "trimmed_mean", "size": 1},
        {"name": "contribution", "estimator": "reconstruct", "base": "median", "permutations": 3},
        {
            "name": "clustered_personalisation",
            "global_rounds": 0,
            "clusters": 1,
            "channels": 8,
            "base": "geometric_median",
        },
    ],
    ids=lambda strategy: strategy["name"],
)
def test_a_run_with_a_rule_is_repeated_to_the_bit(tmp_path: Path, strategy: dict[str, Any]) -> None:
    found = [short_run(tmp_path, f"run-{index}", strategy, "tasks.count=2") for index in range(2)]
    assert found[0]["model_sha256"] == found[1]["model_sha256"]


def test_a_run_that_is_too_small_for_its_rule_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"strategy.dishonest: found 2 with 5 sites.*from 7"):
        short_run(tmp_path, "small", {"name": "krum", "dishonest": 2})
