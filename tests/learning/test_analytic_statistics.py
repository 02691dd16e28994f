"""Sums that have the same bits however samples are divided."""

import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perennial.foundation.errors import DataError, ProtocolError, StateError
from perennial.learning.analytic.compact import compact_statistics, read_compact
from perennial.learning.analytic.solve import Sums, compute_gcv, solve_gaussian, solve_ridge
from perennial.learning.analytic.statistics import (
    PRODUCT,
    Collector,
    Statistics,
    SumsForm,
    add_all_products,
    append_constant,
    pack_triangle,
    read_by_task,
    read_statistics_file,
    sum_weighted,
    write_by_task,
    write_statistics,
)
from perennial.models.feature_maps.projection import CONSTANT_STEPS, GRID, round_to_grid

SAMPLES, WIDTH, CLASSES = 300, 7, range(2, 6)


def samples(seed: int = 0, count: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = round_to_grid(torch.randn(count, WIDTH, generator=generator))
    return features, torch.randint(CLASSES.start, CLASSES.stop, (count,), generator=generator)


def summed(features: Tensor, labels: Tensor, batch: int = SAMPLES) -> Statistics:
    collector = Collector(features.shape[1], CLASSES)
    for part in zip(features.split(batch), labels.split(batch), strict=True):
        collector.add(*part)
    return collector.finish()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 50), st.integers(0, 2**32 - 1), st.integers(1, 80))
def test_any_division_order_and_batch_give_the_same_bits(sites: int, seed: int, batch: int) -> None:
    features, labels = samples()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(SAMPLES, generator=generator)
    site = torch.randint(0, sites, (SAMPLES,), generator=generator)
    parts = [summed(features[order][site == k], labels[order][site == k], batch) for k in range(sites)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert total.sha256 == summed(features, labels).sha256


def test_the_sums_are_those_of_integers() -> None:
    features, labels = samples()
    found = summed(features, labels)
    steps = (append_constant(features) * GRID).to(torch.int64)
    gram = steps.T @ steps
    rows, columns = torch.triu_indices(WIDTH + 1, WIDTH + 1)
    assert torch.equal(found.gram, gram[rows, columns])
    for place, label in enumerate(CLASSES):
        assert torch.equal(found.sums[place], steps[labels == label].sum(dim=0))
    assert found.counts.tolist() == torch.bincount(labels, minlength=6)[2:].tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 400), st.sampled_from([1e-30, 1e-3, 1.0, 1e6]))
def test_every_sample_stays_in_the_ball(seed: int, width: int, scale: float) -> None:
    row = torch.randn(3, width, generator=torch.Generator().manual_seed(seed)) * scale
    phi = append_constant(round_to_grid(row))
    steps = (phi * GRID).to(torch.int64)
    assert bool((steps.square().sum(dim=1) <= PRODUCT).all())
    assert torch.equal(steps[:, -1], torch.full((3,), CONSTANT_STEPS))


def test_what_was_subtracted_was_never_there() -> None:
    features, labels = samples()
    a, b = summed(features[:200], labels[:200]), summed(features[200:], labels[200:])
    assert ((a + b) - b).sha256 == a.sha256


def test_features_off_the_grid_or_too_long_are_refused() -> None:
    with pytest.raises(DataError, match="no multiple"):
        append_constant(torch.full((1, 3), 0.1))
    with pytest.raises(DataError, match="no multiple"):
        append_constant(torch.full((1, 3), torch.nan))
    with pytest.raises(DataError, match="length above 1"):
        append_constant(torch.full((1, 3), 0.5))


def test_a_file_of_sums_that_is_of_another_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "sums.safetensors"
    statistics = Statistics(torch.eye(3, dtype=torch.float64), torch.zeros(2, 3), torch.ones(2), range(2))
    write_statistics(path, statistics, {"site": "a"})
    found, facts = read_statistics_file(path)
    assert found.sha256 == statistics.sha256 and facts["site"] == "a"
    with pytest.raises(StateError, match=r"sums\.safetensors: missing or damaged"):
        read_by_task(path)
    write_by_task(path, {1: statistics}, {"site": "a"})
    with pytest.raises(StateError, match=r"sums\.safetensors: missing or damaged"):
        read_statistics_file(path)
    assert [*read_by_task(path)[0]] == [1]


def test_products_as_a_gpu_adds_them_have_the_bits_of_the_triangle() -> None:
    features, labels = samples(3)
    phi = append_constant(features)
    gram = torch.zeros(WIDTH + 1, WIDTH + 1, dtype=torch.float64)
    for part in phi.split(40):
        add_all_products(gram, part)
    assert torch.equal(pack_triangle(gram), summed(features, labels).gram)
    assert torch.equal(gram, gram.T)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_adds_the_same_bits_and_solves_for_the_same_head() -> None:
    generator = torch.Generator().manual_seed(0)
    features = round_to_grid(torch.randn(3000, 500, generator=generator))
    labels = torch.randint(CLASSES.start, CLASSES.stop, (3000,), generator=generator)
    device = torch.device("cuda")
    found = []
    for place in (None, device):
        collector = Collector(500, CLASSES, device=place)
        for part in zip(features.split(700), labels.split(700), strict=True):
            collector.add(part[0].to(place or "cpu"), part[1].to(place or "cpu"))
        found.append(collector.finish())
    assert found[0].sha256 == found[1].sha256
    sums = Sums.of(found[0])
    for head in (solve_gaussian, solve_ridge, partial(solve_ridge, standardise=True)):
        plain, there = head(sums, 0.1), head(sums.move_to(device), 0.1)
        assert there.weight.device == torch.device("cpu")
        for one, other in ((plain.weight, there.weight), (plain.bias, there.bias)):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert compute_gcv(sums.move_to(device), [0.1, 1.0]) == pytest.approx(compute_gcv(sums, [0.1, 1.0]))


COMPACT_STATISTICS_CLASSES = range(3)


def rows_of(samples: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.relu(torch.randn(samples, width, generator=generator))
    return round_to_grid(features), torch.arange(samples) % len(COMPACT_STATISTICS_CLASSES)


def sums_of(features: Tensor, labels: Tensor) -> Statistics:
    collector = Collector(features.shape[1], COMPACT_STATISTICS_CLASSES)
    collector.add(features, labels)
    return collector.finish()


def sent_and_read(sums: Statistics) -> tuple[dict[str, Tensor], Statistics]:
    sent = compact_statistics(sums)
    back = read_compact(sent, SumsForm(sums.width), sums.classes)
    return sent, Statistics(back["gram"], back["sums"], back["counts"], sums.classes)


def size(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@pytest.mark.parametrize(
    ("samples", "width", "form"),
    [(0, 30, "factor"), (1, 30, "factor"), (20, 200, "factor"), (150, 200, "planes"), (400, 60, "planes")],
)
def test_the_receiver_has_the_same_integers(samples: int, width: int, form: str) -> None:
    sums = sums_of(*rows_of(samples, width))
    sent, found = sent_and_read(sums)
    assert form in sent and found.sha256 == sums.sha256
    assert size(sent) < SumsForm(width + 1).bytes(len(COMPACT_STATISTICS_CLASSES))


def test_a_factor_tells_nothing_beyond_the_sums() -> None:
    """Rows in another order have the same sums, and the same bytes leave."""
    features, labels = rows_of(25, 300)
    order = torch.from_numpy(np.random.default_rng(3).permutation(25))
    one, other = (compact_statistics(sums_of(features[rows], labels[rows])) for rows in (slice(None), order))
    assert one.keys() == other.keys() and "factor" in one
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_sums_whose_factor_might_round_to_others_leave_as_they_are() -> None:
    """Weights of 2^18 make products so large that half a step is less than the error of a product."""
    features, labels = rows_of(20, 200)
    of_class = sums_of(features[labels == 0], labels[labels == 0])
    sums = sum_weighted([(of_class, 1 << 18)], 201, COMPACT_STATISTICS_CLASSES)
    sent, found = sent_and_read(sums)
    assert "planes" in sent and found.sha256 == sums.sha256


def factor() -> dict[str, Tensor]:
    return compact_statistics(sums_of(*rows_of(5, 40)))


def planes(content: bytes) -> dict[str, Tensor]:
    sums = sums_of(*rows_of(60, 40))
    packed = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
    return {"planes": packed, "sums": sums.sums, "counts": sums.counts}


LIES = {
    "an order that names a feature twice": {**factor(), "order": torch.zeros(40, dtype=torch.int32)},
    "an order of another length": {**factor(), "order": torch.arange(41, dtype=torch.int32)},
    "an order of another type": {**factor(), "order": torch.arange(40)},
    "no order": {name: tensor for name, tensor in factor().items() if name != "order"},
    "no factor": {name: tensor for name, tensor in factor().items() if name != "factor"},
    "a factor that is no trapezoid": {**factor(), "factor": factor()["factor"][:-1]},
    "a factor of too many rows": {**factor(), "factor": torch.ones(41 * 20 + 1, dtype=torch.float64)},
    "a factor of another type": {**factor(), "factor": factor()["factor"].float()},
    "a factor that is not finite": {**factor(), "factor": factor()["factor"] * torch.nan},
    "a factor that is too large": {**factor(), "factor": factor()["factor"] * 1e9},
    "sums of another width": {**factor(), "sums": torch.zeros(3, 40, dtype=torch.int64)},
    "a matrix too": {**factor(), "gram": torch.zeros(41 * 42 // 2, dtype=torch.int64)},
    "planes that are no stream": planes(b"nothing"),
    "planes that are cut short": planes(zlib.compress(bytes(8 * 861))[:-6]),
    "planes that are too few": planes(zlib.compress(bytes(8 * 860))),
    "planes that grow without end": planes(zlib.compress(bytes(1 << 24))),
    "planes of another type": {**planes(b"nothing"), "planes": torch.zeros(5)},
}


@pytest.mark.parametrize("lie", LIES)
def test_tensors_of_no_matrix_are_refused(lie: str) -> None:
    with pytest.raises(ProtocolError, match="StatisticsReply: statistics: found"):
        read_compact(LIES[lie], SumsForm(41), COMPACT_STATISTICS_CLASSES)
