"""The order of arrival changes no bit of the aggregate."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strategies.exact_sum import ExactSum


def norm(update: dict[str, Tensor]) -> float:
    return float(torch.cat([t.reshape(-1) for t in update.values()]).norm())


@settings(deadline=None, max_examples=25)
@given(st.permutations(list(range(7))), st.integers(0, 1000), st.floats(1e-3, 1e4))
def test_any_order_gives_the_same_bits_and_the_right_value(order: list[int], seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    reference = {"a": torch.randn(5, 3, generator=generator), "b": torch.randn((), generator=generator)}
    updates = [
        {name: scale * torch.randn(t.shape, generator=generator) for name, t in reference.items()}
        for _ in range(7)
    ]
    weights = [float(1 + 37 * index) for index in range(7)]
    results = []
    for sequence in (range(7), order):
        total = ExactSum(reference)
        for index in sequence:
            total.add(updates[index], weights[index], norm(updates[index]))
        results.append(total.added_to(reference))
    for name, tensor in reference.items():
        assert torch.equal(results[0][name], results[1][name])
        mean = sum(w * u[name].double() for w, u in zip(weights, updates, strict=True)) / sum(weights)
        assert torch.allclose(results[0][name].double(), tensor.double() + mean, rtol=1e-6, atol=1e-6)


def test_a_sum_that_cannot_be_held_is_refused() -> None:
    total = ExactSum({"a": torch.zeros(2)})
    with pytest.raises(OverflowError, match="does not fit"):
        total.add({"a": torch.full((2,), 1e9)}, 1e6, 1.5e9)
