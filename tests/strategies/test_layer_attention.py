"""Layer attention: hand-computed weights, the published rule computed independently, order of arrival."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perennial.foundation.errors import ConfigError
from perennial.strategies import layer_attention as bundle_module
from perennial.strategies.layer_attention import LayerAttention, describe_dominance
from perennial.strategies.round.context import RoundOutcome
from perennial.strategies.round.gate import Admitted, Rejected
from perennial.strategies.sums import exact_sum
from tests.rounds import begun

Arrays = dict[str, Tensor]


OUTCOMES: dict[LayerAttention, RoundOutcome] = {}
"""Of the latest round of each strategy."""


def reply(site: str, update: Arrays, samples: int = 1) -> Admitted:
    norm = float(torch.cat([tensor.reshape(-1) for tensor in update.values()]).norm())
    return Admitted(site, update, norm, samples)


def aggregate(
    strategy: LayerAttention, reference: Arrays, updates: Sequence[Arrays], samples: Sequence[int] = ()
) -> Arrays:
    round_ = begun(strategy, reference, replies=len(updates) or 1)
    OUTCOMES[strategy] = round_.ctx.outcome
    for index, update in enumerate(updates):
        round_.add(reply(f"site-{index}", update, samples[index] if samples else 1))
    return round_.result()


def weights(strategy: LayerAttention, layer: str = "a") -> list[float]:
    return list(OUTCOMES[strategy].details["attention"][layer]["weights"].values())


def scalars(*values: float) -> list[Arrays]:
    return [{"a": torch.tensor([value])} for value in values]


ZERO = {"a": torch.zeros(1)}


def random_updates(seed: int, count: int, scale: float = 1.0) -> tuple[Arrays, list[Arrays]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"body.weight": (4, 3, 2, 2), "body.bias": (4,), "head.weight": (3, 4), "head.bias": (3,)}
    reference = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    updates = [
        {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for _ in range(count)
    ]
    return reference, updates


@pytest.mark.parametrize(
    ("sign", "expected", "result"),
    [(1, (0.119203, 0.880797), 2.761594), (-1, (0.880797, 0.119203), 1.238406)],
)
def test_one_scalar_layer_by_hand(sign: int, expected: tuple[float, float], result: float) -> None:
    strategy = LayerAttention(sign=sign)  # type: ignore[arg-type]
    value = aggregate(strategy, ZERO, scalars(1.0, 3.0))
    assert weights(strategy) == pytest.approx(expected, abs=1e-6)
    assert float(value["a"]) == pytest.approx(result, abs=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_published_rule_computed_by_another_way(sign: int) -> None:
    reference, updates = random_updates(3, 4)
    value = aggregate(LayerAttention(alpha=1.2, sign=sign), reference, updates)  # type: ignore[arg-type]
    for name, tensor in reference.items():
        server = tensor.numpy().astype(np.float64)
        clients = [server + update[name].numpy() for update in updates]
        distance = np.array([np.sqrt(((server - client) ** 2).sum()) for client in clients])
        exponential = np.exp(sign * distance)
        attention = exponential / exponential.sum()
        gradient = sum(a * (server - client) for a, client in zip(attention, clients, strict=True))
        np.testing.assert_allclose(value[name].numpy(), server - 1.2 * gradient, rtol=1e-5, atol=1e-6)


def test_the_printed_head_rule_by_another_way() -> None:
    reference, updates = random_updates(4, 3)
    value = aggregate(LayerAttention(alpha=0.7, head_query="client_mean"), reference, updates)
    for name in ("head.weight", "head.bias"):
        clients = np.stack([(reference[name] + update[name]).double().numpy() for update in updates])
        mean = clients.mean(axis=0)
        distance = np.array([np.linalg.norm((mean - client).ravel()) for client in clients])
        attention = np.exp(distance) / np.exp(distance).sum()
        expected = mean - 0.7 * (attention.reshape(-1, *[1] * mean.ndim) * (mean - clients)).sum(axis=0)
        np.testing.assert_allclose(value[name].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_equal_sites_and_equal_distances_give_the_plain_mean() -> None:
    strategy = LayerAttention()
    value = aggregate(strategy, {"a": torch.tensor([2.0])}, scalars(0.5, 0.5, 0.5))
    assert weights(strategy) == [1 / 3] * 3
    assert float(value["a"]) == pytest.approx(2.5, abs=1e-7)
    value = aggregate(strategy, ZERO, scalars(1.0, -1.0))
    assert float(value["a"]) == pytest.approx(0.0, abs=1e-7)
    half = aggregate(LayerAttention(alpha=0.5), {"a": torch.tensor([2.0])}, scalars(0.5, 0.5))
    assert float(half["a"]) == pytest.approx(2.25, abs=1e-7)


@settings(deadline=None, max_examples=40)
@given(st.permutations(list(range(6))), st.integers(0, 1000), st.floats(1e-3, 1e3), st.sampled_from([1, -1]))
def test_any_order_of_arrival_gives_the_same_bits(
    order: list[int], seed: int, scale: float, sign: int
) -> None:
    reference, updates = random_updates(seed, 6, scale)
    for options in ({}, {"scale": "mean", "head_query": "client_mean"}):
        results = []
        for sequence in (range(6), order):
            strategy = LayerAttention(sign=sign, **options)  # type: ignore[arg-type]
            round_ = begun(strategy, reference, replies=len(updates))
            for index in sequence:
                round_.add(reply(f"site-{index}", updates[index], 1 + 7 * index))
            results.append((round_.result(), round_.ctx.outcome.details, strategy.summary_blocks()))
        first, second = results
        assert all(torch.equal(first[0][name], second[0][name]) for name in reference)
        assert first[1:] == second[1:]


def test_distances_that_would_overflow_and_saturation() -> None:
    strategy = LayerAttention()
    aggregate(strategy, ZERO, scalars(1e4, 0.0))
    assert weights(strategy) == [1.0, 0.0]
    aggregate(strategy, ZERO, scalars(20.0, 0.0))
    assert 0 < 1 - weights(strategy)[0] < 2.1e-9


@pytest.mark.parametrize("scale", ["none", "mean"])
def test_the_layers_of_a_large_model_are_summed_on_threads(
    monkeypatch: pytest.MonkeyPatch, scale: Literal["none", "mean"]
) -> None:
    reference, updates = random_updates(11, 5)
    plain = aggregate(LayerAttention(scale=scale), reference, updates)
    size = sum(tensor.numel() for tensor in reference.values())
    monkeypatch.setattr(exact_sum, "LARGE_FROM", size)
    monkeypatch.setattr(bundle_module, "WORTH_THREADS", size)
    # every layer alone is smaller than that: the whole model decides
    monkeypatch.delattr(exact_sum.ExactSum, "_add_in_pieces")
    large = aggregate(LayerAttention(scale=scale), reference, updates)
    shuffled = aggregate(LayerAttention(scale=scale), reference, updates[::-1])
    for name in reference:
        assert torch.allclose(large[name], plain[name], rtol=0, atol=1e-6)
        assert torch.equal(large[name], shuffled[name])


def test_a_site_that_takes_over_is_named_and_the_literal_rule_lets_it() -> None:
    strategy = LayerAttention()
    value = aggregate(strategy, ZERO, scalars(0.1, 0.1, 21.0))
    assert float(value["a"]) == pytest.approx(21.0, abs=1e-6)
    [warning] = OUTCOMES[strategy].warnings
    assert "site-2" in warning
    assert "1 of 1 layers" in warning
    assert describe_dominance({"a": {"one": 0.99, "two": 0.01}}) == []
    near = LayerAttention(sign=-1)
    assert abs(float(aggregate(near, ZERO, scalars(0.1, 0.1, 21.0))["a"]) - 0.1) < 1e-6
    assert OUTCOMES[near].warnings == []


def test_an_update_of_no_finite_or_no_possible_size_is_rejected_before_any_sum() -> None:
    strategy = LayerAttention()
    round_ = begun(strategy, {"a": torch.zeros(4)})
    with pytest.raises(Rejected, match="layer 'a': its distance"):
        round_.add(reply("site-0", {"a": torch.full((4,), 3e38)}))
    with pytest.raises(Rejected, match="does not fit"):
        round_.add(reply("site-1", {"a": torch.full((4,), 1e7)}))
    round_.add(reply("site-2", {"a": torch.ones(4)}))
    assert torch.equal(round_.result()["a"], torch.ones(4))


def test_the_printed_head_rule_needs_a_head_of_its_own() -> None:
    strategy = LayerAttention(head_query="client_mean")
    with pytest.raises(ConfigError, match=r"starts with 'head\.'"):
        begun(strategy, ZERO)
