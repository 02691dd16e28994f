"""The weights by hand and in general, and the aggregate that is folded from them as replies come."""

import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perennial.protocol.messages import TrainRequest
from perennial.protocol.stamp import Stamp
from perennial.strategies import multi_factor
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.fedavg import FedAvg
from perennial.strategies.multi_factor import MultiFactor, cap_weights, mix_factors, share
from perennial.strategies.round.context import Aggregator, RoundOutcome
from perennial.strategies.round.gate import Admitted, Rejected
from tests import rounds

STAMP = Stamp(run="r", experiment="e", class_order="c", task=1, round=4, num_classes=2)
REFERENCE = {"w": torch.zeros(3, 4), "b": torch.zeros(2)}
NAMES = ("size", "timeliness", "quality", "inverse_loss")
factor = st.one_of(st.none(), st.floats(0, 1e6))
coefficients = st.lists(st.floats(0, 10), min_size=4, max_size=4).filter(lambda c: sum(c) > 1e-6)


def weights(
    mix: dict[str, float], values: list[dict[str, float | None]], largest: float = 1.0
) -> list[float]:
    shares = {name: share([site[name] for site in values]) for name in mix}
    raw = [mix_factors(mix, shares, site) for site in values]
    filled = cap_weights(raw, largest)
    return [filled.weight(position, weight) for position, weight in enumerate(raw)]


def reply(site: str, seed: int, **fields: Any) -> Admitted:
    generator = torch.Generator().manual_seed(seed)
    update = {name: torch.randn(t.shape, generator=generator) for name, t in REFERENCE.items()}
    norm = math.sqrt(sum(float(t.square().sum()) for t in update.values()))
    known: Any = {"num_examples": 10, "base_round": 4} | fields
    return Admitted(site, update, norm, **known)


def told(accuracy: float, loss: float) -> dict[str, float]:
    return {"held_out_accuracy": accuracy, "classification_loss": loss}


def begun(strategy: IncrementalStrategy) -> Aggregator:
    round_ = rounds.begun(strategy, REFERENCE, stamp=STAMP)
    OUTCOMES[strategy] = round_.ctx.outcome
    return round_


OUTCOMES: dict[IncrementalStrategy, RoundOutcome] = {}
"""Of the latest round of each strategy."""


def aggregate(strategy: IncrementalStrategy, replies: list[Admitted]) -> dict[str, torch.Tensor]:
    round_ = begun(strategy)
    for each in replies:
        round_.add(each)
    return round_.result()


def plainly(strategy: MultiFactor, replies: list[Admitted]) -> dict[str, torch.Tensor]:
    """The same mean, from all updates at once."""
    by_site = OUTCOMES[strategy].details["weights"]
    return {
        name: sum((each.update[name].double() * by_site[each.site] for each in replies), torch.zeros(()))
        for name in REFERENCE
    }


def test_by_hand() -> None:
    mix = {"size": 0.5, "inverse_loss": 0.5}
    values: list[dict[str, float | None]] = [
        {"size": 10.0, "inverse_loss": 1 / 1},
        {"size": 30.0, "inverse_loss": 1 / 3},
    ]
    assert share([10.0, 30.0]).of(10.0) == 0.25
    assert share([1.0, 1 / 3]).of(1.0) == pytest.approx(0.75)
    assert weights(mix, values) == pytest.approx([0.5, 0.5])


@given(coefficients, st.lists(st.lists(factor, min_size=4, max_size=4), min_size=1, max_size=9), st.data())
def test_weights_lie_on_the_simplex_below_the_cap(
    mix: list[float], rows: list[list[float | None]], data: st.DataObject
) -> None:
    largest = data.draw(st.floats(0.05, 1.0))
    found = weights(
        dict(zip(NAMES, mix, strict=True)), [dict(zip(NAMES, r, strict=True)) for r in rows], largest
    )
    assert all(weight >= 0 for weight in found)
    assert sum(found) == pytest.approx(1.0)
    if len(rows) > 2:
        assert max(found) <= max(largest, 1 / len(rows)) + 1e-9


@pytest.mark.parametrize(
    ("raw", "largest", "expected"),
    [
        ([0.6, 0.25, 0.1, 0.05], 0.3, [0.3, 0.3, 0.4 * 2 / 3, 0.4 / 3]),
        ([0.7, 0.2, 0.1], 0.5, [0.5, 0.5 * 2 / 3, 0.5 / 3]),
        ([0.9, 0.1], 0.5, [0.9, 0.1]),
        ([0.9, 0.05, 0.05], 0.2, [1 / 3, 1 / 3, 1 / 3]),
        ([1.0, 0.0, 0.0], 0.5, [0.5, 0.25, 0.25]),
    ],
)
def test_the_cap_by_hand(raw: list[float], largest: float, expected: list[float]) -> None:
    filled = cap_weights(raw, largest)
    assert [filled.weight(k, weight) for k, weight in enumerate(raw)] == pytest.approx(expected)


def test_size_alone_is_fedavg_to_the_bit() -> None:
    replies = [
        reply(f"site-{k}", k, num_examples=n, metrics=told(0.1 * k, 1.0)) for k, n in enumerate((7, 11, 5))
    ]
    ours = aggregate(MultiFactor(alpha=0.3, beta=0, gamma=0, delta=0), replies)
    theirs = aggregate(FedAvg(), replies)
    assert all(torch.equal(ours[name], theirs[name]) for name in REFERENCE)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 200), st.none() | st.floats(0, 1), st.none() | st.floats(0, 9), st.integers(0, 2)
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([0.2, 0.34, 0.5, 1.0]),
    st.randoms(),
)
def test_folding_one_by_one_is_the_weighted_mean_in_any_order(
    rows: list[tuple[int, float | None, float | None, int]], cap: float, random: Any
) -> None:
    replies = [
        reply(f"site-{k}", k, num_examples=n, base_round=4 - late) for k, (n, _, _, late) in enumerate(rows)
    ]
    for k, (_, accuracy, loss, _) in enumerate(rows):
        metrics = {"held_out_accuracy": accuracy, "classification_loss": loss}
        told = {name: value for name, value in metrics.items() if value is not None}
        replies[k] = replace(replies[k], metrics=told)
    strategy = MultiFactor(alpha=0.4, beta=0.2, gamma=0.2, delta=0.2)
    shuffled = list(replies)
    random.shuffle(shuffled)
    with patch.object(multi_factor, "MAX_WEIGHT", cap):
        found, again = aggregate(strategy, replies), aggregate(strategy, shuffled)
    for name, expected in plainly(strategy, replies).items():
        torch.testing.assert_close(found[name].double(), expected, rtol=0, atol=2e-5)
    assert all(torch.equal(again[name], found[name]) for name in REFERENCE)


def test_a_late_reply_weighs_less() -> None:
    strategy = MultiFactor(alpha=0, beta=1, gamma=0, delta=0)
    aggregate(strategy, [reply("now", 1), reply("late", 2, base_round=2)])
    weight = OUTCOMES[strategy].details["weights"]
    assert weight["late"] / weight["now"] == pytest.approx(math.exp(-1.0), rel=1e-4)
    assert strategy.measurements == []


@pytest.mark.parametrize(
    ("metrics", "field"),
    [
        (told(math.nan, 1.0), "held_out_accuracy"),
        (told(1.2, 1.0), "held_out_accuracy"),
        (told(-0.1, 1.0), "held_out_accuracy"),
        (told(0.5, -1.0), "classification_loss"),
        (told(0.5, math.nan), "classification_loss"),
        (told(0.5, math.inf), "classification_loss"),
        ({"held_out_accuracy": "0.5"}, "held_out_accuracy"),
        ({"held_out_accuracy": True}, "held_out_accuracy"),
    ],
)
def test_a_reply_with_an_impossible_figure_is_rejected_and_leaves_no_trace(
    metrics: dict[str, Any], field: str
) -> None:
    round_ = begun(MultiFactor(0.7, 0.1, 0.1, 0.1))
    round_.add(reply("honest", 1, metrics=told(0.5, 1.0)))
    with pytest.raises(Rejected, match=field):
        round_.add(reply("liar", 2, metrics=metrics))
    found = round_.result()
    alone = aggregate(MultiFactor(0.7, 0.1, 0.1, 0.1), [reply("honest", 1, metrics=told(0.5, 1.0))])
    assert all(torch.equal(found[name], alone[name]) for name in REFERENCE)


def test_sites_are_asked_for_what_the_weights_need_in_one_message_for_all() -> None:
    request = TrainRequest(**STAMP.stamp_fields, arrays=REFERENCE, settings='{"mu": 1}')  # type: ignore[arg-type]
    strategy = MultiFactor(0.7, 0.1, 0.1, 0.1)
    first, second = strategy.requests(request, ["a", "b"]).values()
    assert first is second
    assert first.settings == '{"mu": 1, "tell": ["held_out_accuracy", "classification_loss"]}'
    assert MultiFactor(gamma=0, delta=0).requests(request, ["a"]) == {"a": request}
    literal = MultiFactor(beta=0.1, gamma=0.1, quality="train", timeliness="coverage")
    assert literal.measurements == ["class_coverage", "train_accuracy"]
