"""The order of arrival changes no bit of the aggregate."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perennial.protocol.tensors import unpack
from perennial.strategies.sums import exact_kernel, exact_sum
from perennial.strategies.sums.exact_sum import GRID, ExactSum


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


def test_small_values_keep_the_precision_that_is_promised() -> None:
    """The grid is 2^-34: a value of 0.0001 keeps more digits than float32 has, and so does a sum of many."""
    assert GRID == 2.0**-34
    draw = torch.Generator().manual_seed(8)
    updates = [1e-4 * torch.randn(3000, generator=draw) for _ in range(40)]
    total = ExactSum({"a": updates[0]})
    for update in updates:
        total.add({"a": update}, 1.0, float(update.norm()))
    exact = torch.stack(updates).double().sum(dim=0)
    error = (total.value()["a"] - exact).abs()
    assert float(error.max()) <= 40 * 2.0**-35
    # rounding errors of half a step at most, not all of one sign
    assert float(error.mean()) < 4 * 2.0**-35
    mean = total.added_to({"a": torch.zeros(3000)})["a"].double()
    assert float((mean - exact / 40).abs().max()) <= 2.0**-35 + 1e-4 * 2.0**-23
    # what is not on a coarser grid stays what it is
    fine = ExactSum({"a": torch.zeros(1)})
    fine.add({"a": torch.full((1,), 3 * 2.0**-34)}, 1.0, 1.0)
    assert float(fine.value()["a"]) == 3 * 2.0**-34


def test_large_updates_are_rounded_to_the_same_grid() -> None:
    """Above the limit of the fast way the sum still holds whole grid steps, and mixes with small updates."""
    total = ExactSum({"a": torch.zeros(2)})
    large = torch.tensor([3.0e5, -2.5e5])
    total.add({"a": large}, 2.0, float(large.norm()))
    total.add({"a": torch.tensor([3 * 2.0**-34, 0.5])}, 1.0, 0.6)
    assert total.value()["a"].tolist() == [6.0e5 + 3 * 2.0**-34, -5.0e5 + 0.5]
    assert total.weight == 3.0 and len(total) == 2


def test_a_sum_that_cannot_be_held_is_refused() -> None:
    total = ExactSum({"a": torch.zeros(2)})
    with pytest.raises(OverflowError, match="does not fit"):
        total.add({"a": torch.full((2,), 1e9)}, 1e6, 1.5e9)


def test_the_compiled_loop_sums_as_the_small_models_do(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    # one tensor larger than a group, and small neighbours that share one
    shapes = {"large": (70_000,), "matrix": (11, 7), "scalar": ()}
    updates = [{n: torch.randn(s, generator=generator) for n, s in shapes.items()} for _ in range(5)]
    weights = [1.0, 37.0, 2.5, 1000.0, 3.0]

    def total(order: list[int]) -> dict[str, Tensor]:
        result = ExactSum(updates[0])
        for index in order:
            result.add(updates[index], weights[index], norm(updates[index]))
        return result.value()

    plain = total([0, 1, 2, 3, 4])
    reference = {name: torch.ones(shape) for name, shape in shapes.items() if name != "matrix"}

    def mean() -> dict[str, Tensor]:
        result = ExactSum(updates[0])
        for update, weight in zip(updates, weights, strict=True):
            result.add(update, weight, norm(update))
        return result.added_to(reference)

    plain_mean = mean()
    monkeypatch.setattr(exact_sum, "COMPILED_FROM", 1)
    monkeypatch.delattr(ExactSum, "_add_in_pieces")
    monkeypatch.setattr(exact_kernel, "PIECE", 20_000)
    compiled_mean = mean()
    assert list(compiled_mean) == list(reference)
    for name in reference:
        assert torch.allclose(compiled_mean[name], plain_mean[name], rtol=1e-7, atol=1e-9)
    compiled, shuffled = total([0, 1, 2, 3, 4]), total([3, 1, 4, 0, 2])
    for name in shapes:
        assert torch.equal(compiled[name], shuffled[name])
        exact = sum(w * u[name].double() for w, u in zip(weights, updates, strict=True))
        assert torch.allclose(compiled[name], torch.as_tensor(exact), rtol=0, atol=5 * GRID / 2 + 1e-12)
        assert torch.allclose(compiled[name], plain[name], rtol=0, atol=5 * GRID)


def test_what_arrives_from_the_wire_can_be_summed_by_the_compiled_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exact_sum, "COMPILED_FROM", 1)
    arrived = unpack(ArrayRecord({"a": Array(np.ones((300, 300), dtype=np.float32))}), "update")
    result = ExactSum(arrived)
    result.add(arrived, 2.0, arrived.norm)
    assert arrived.norm == pytest.approx(300.0)
    assert torch.equal(result.value()["a"], torch.full((300, 300), 2.0, dtype=torch.float64))
