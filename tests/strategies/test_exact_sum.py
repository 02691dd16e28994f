"""The order of arrival changes no bit of the aggregate."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perennial.models.sum_grid import SumGrid
from perennial.protocol.tensors import unpack
from perennial.strategies.sums import exact_loops, exact_sum
from perennial.strategies.sums.exact_sum import ExactSum

COUNTS = SumGrid(updates=8, largest_weight=2.0**20)
"""For a handful of sites that are weighted by samples."""


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
        total = ExactSum(reference, COUNTS)
        for index in sequence:
            total.add(updates[index], weights[index], norm(updates[index]))
        results.append(total.add_to(reference))
    for name, tensor in reference.items():
        assert torch.equal(results[0][name], results[1][name])
        mean = sum(w * u[name].double() for w, u in zip(weights, updates, strict=True)) / sum(weights)
        assert torch.allclose(results[0][name].double(), tensor.double() + mean, rtol=1e-6, atol=1e-6)


def test_what_another_site_claims_decides_nothing_about_an_honest_one() -> None:
    grid = SumGrid(updates=3, largest_weight=2.0**20)
    honest, huge = {"a": torch.full((4,), 500.0)}, {"a": torch.full((4,), 1e9)}
    for order in (("honest", "huge", "honest"), ("huge", "honest", "honest")):
        total, refused = ExactSum(honest, grid), 0
        for who in order:
            update, weight = (honest, 1e6) if who == "honest" else (huge, 1e8)
            try:
                total.add(update, weight, norm(update))
            except OverflowError as error:
                assert "does not fit the sum" in str(error)
                refused += 1
        assert refused == 1 and len(total) == 2
        assert torch.equal(total.add_to(honest)["a"], torch.full((4,), 1000.0))


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 5000), st.lists(st.floats(1e-6, 2.0**20), min_size=1, max_size=12), st.integers(0, 1000)
)
def test_the_error_is_what_the_module_says(sites: int, weights: list[float], seed: int) -> None:
    """Exact rational arithmetic beside it; weights far below 1 among them."""
    grid = SumGrid(updates=max(sites, len(weights)), largest_weight=2.0**20)
    generator = torch.Generator().manual_seed(seed)
    updates = [
        torch.randn(5, generator=generator) * 10 ** float(torch.rand((), generator=generator) * 4 - 2)
        for _ in weights
    ]
    total = ExactSum({"a": updates[0]}, grid)
    for update, weight in zip(updates, weights, strict=True):
        total.add({"a": update}, weight, float(update.norm()))
    found = total.value()["a"]
    for position in range(5):
        terms = [Fraction(w) * Fraction(float(u[position])) for w, u in zip(weights, updates, strict=True)]
        bound = len(terms) * Fraction(grid.step) / 2 + sum(map(abs, terms), Fraction(0)) / 2**53
        error = abs(Fraction(float(found[position])) - sum(terms, Fraction(0)))
        # value() is a float64 itself
        assert error <= bound + abs(sum(terms, Fraction(0))) / 2**53


def test_integers_of_the_sites_add_up_to_the_sum_modulo_the_width() -> None:
    generator = torch.Generator().manual_seed(5)
    for grid in (SumGrid(updates=4, largest_weight=8.0, largest_norm=4.0), SumGrid(4, 8.0, 4.0e6)):
        updates = [{"a": torch.randn(7, generator=generator)} for _ in range(4)]
        updates = [{"a": u["a"] * (4.0 / u["a"].norm())} for u in updates]
        steps = [grid.quantise(update, 7.0) for update in updates]
        for update, step in zip(updates, steps, strict=True):
            sent = grid.values(step)["a"]
            assert bool((sent.abs() <= 7.0 * update["a"].double().abs()).all())
        mask = torch.randint(-(2**62), 2**62, (7,), generator=generator)
        masked = {"a": sum(step["a"] for step in steps[1:]) + steps[0]["a"] + mask}
        opened = grid.values({"a": masked["a"] - mask})["a"]
        exact = sum(7.0 * update["a"].double() for update in updates)
        assert torch.allclose(opened, torch.as_tensor(exact), rtol=0, atol=4 * grid.step)
    with pytest.raises(OverflowError, match="grid allows"):
        SumGrid(4, 8.0, 4.0).quantise({"a": torch.full((7,), 1e18)}, 8.0)


def test_a_large_model_is_summed_as_small_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    # one tensor larger than a group, and small neighbours that share one
    shapes = {"large": (70_000,), "matrix": (11, 7), "scalar": ()}
    updates = [{n: torch.randn(s, generator=generator) for n, s in shapes.items()} for _ in range(5)]
    weights = [1.0, 37.0, 2.5, 1000.0, 3.0]

    def total(order: list[int]) -> dict[str, Tensor]:
        result = ExactSum(updates[0], COUNTS)
        for index in order:
            result.add(updates[index], weights[index], norm(updates[index]))
        return result.value()

    plain = total([0, 1, 2, 3, 4])
    reference = {name: torch.ones(shape) for name, shape in shapes.items() if name != "matrix"}

    def mean() -> dict[str, Tensor]:
        result = ExactSum(updates[0], COUNTS)
        for update, weight in zip(updates, weights, strict=True):
            result.add(update, weight, norm(update))
        return result.add_to(reference)

    plain_mean = mean()
    monkeypatch.setattr(exact_sum, "LARGE_FROM", 1)
    monkeypatch.delattr(ExactSum, "_add_in_pieces")
    monkeypatch.setattr(exact_loops, "PIECE", 20_000)
    large_mean = mean()
    assert list(large_mean) == list(reference)
    for name in reference:
        assert torch.allclose(large_mean[name], plain_mean[name], rtol=1e-7, atol=1e-9)
    large, shuffled = total([0, 1, 2, 3, 4]), total([3, 1, 4, 0, 2])
    for name in shapes:
        assert torch.equal(large[name], shuffled[name])
        exact = sum(w * u[name].double() for w, u in zip(weights, updates, strict=True))
        assert torch.allclose(large[name], torch.as_tensor(exact), rtol=0, atol=5 * COUNTS.step / 2 + 1e-12)
        assert torch.allclose(large[name], plain[name], rtol=0, atol=5 * COUNTS.step)


def test_what_arrives_from_the_wire_can_be_summed_as_a_large_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exact_sum, "LARGE_FROM", 1)
    arrived = unpack(ArrayRecord({"a": Array(np.ones((300, 300), dtype=np.float32))}), "update")
    result = ExactSum(arrived, COUNTS)
    result.add(arrived, 2.0, arrived.norm)
    assert arrived.norm == pytest.approx(300.0)
    assert torch.equal(result.value()["a"], torch.full((300, 300), 2.0, dtype=torch.float64))
