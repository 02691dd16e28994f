"""Clipping and the two protected releases, with the cases in which other libraries got them wrong."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from perennial.foundation.errors import PrivacyError
from perennial.foundation.streams import stream
from perennial.privacy.noise import Noise
from perennial.privacy.protection import (
    clip,
    clip_tensors,
    compute_central_noise_std,
    compute_effective_multiplier,
    protect_update,
)
from tests.seeded_noise import SeededNoise

vectors = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=50).map(torch.tensor)
norms = st.floats(1e-6, 1e6)


def true_norm(*tensors: Tensor) -> float:
    values = torch.cat([tensor.double().reshape(-1) for tensor in tensors]).tolist()
    return math.sqrt(math.fsum(value * value for value in values))


@given(vectors, norms)
def test_clip_bounds_the_rounded_vector_and_keeps_its_direction(vector: Tensor, clip_norm: float) -> None:
    before = vector.clone()
    norm = clip(vector, clip_norm)
    assert norm == pytest.approx(true_norm(before), rel=1e-12)
    if norm <= clip_norm:
        assert torch.equal(vector, before)
    else:
        assert true_norm(vector) <= clip_norm
        assert true_norm(vector) == pytest.approx(clip_norm, rel=1e-5)
        expected = before.double() * (clip_norm / norm)
        assert torch.allclose(vector.double(), expected, rtol=1e-6, atol=1e-30)


def test_within_the_bound_the_bits_stay() -> None:
    vector = torch.tensor([0.1, -0.0, 1e-42, 0.3])
    before = vector.view(torch.int32).clone()
    clip(vector, 1.0)
    assert torch.equal(vector.view(torch.int32), before)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_an_update_that_overflowed_is_released_like_one_of_nothing(value: float) -> None:
    overflowed, nothing = torch.tensor([1.0, value]), torch.zeros(2)
    noise = [SeededNoise(np.random.default_rng(1)) for _ in range(2)]
    protect_update(overflowed, 1.0, 1.0, noise[0])
    protect_update(nothing, 1.0, 1.0, noise[1])
    assert torch.equal(overflowed, nothing)


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, float("nan"), float("inf")])
def test_clip_norms_that_bound_nothing_are_refused(clip_norm: float) -> None:
    with pytest.raises(PrivacyError, match="clip norm"):
        clip(torch.ones(2), clip_norm)


def test_integer_buffers_are_neither_measured_nor_changed() -> None:
    weight, counter = torch.tensor([3.0, 4.0]), torch.tensor(10_000)
    assert clip_tensors([weight, counter], 10.0) == 5.0
    assert clip_tensors([weight, counter], 1.0) == 5.0
    assert counter.item() == 10_000
    assert true_norm(weight) == pytest.approx(1.0)


def test_views_of_one_vector_are_clipped_in_it() -> None:
    vector = torch.tensor([3.0, 0.0, 0.0, 4.0])
    assert clip_tensors([vector[:1], vector[1:].view(1, 3)], 1.0) == 5.0
    assert vector.tolist() == pytest.approx([0.6, 0.0, 0.0, 0.8], rel=1e-6)


def test_protected_update_has_the_noise_of_its_setting() -> None:
    vector = torch.full((40_000,), 1.0)
    protect_update(vector, 0.5, 1.0, SeededNoise(stream(1, "dp-noise")))
    assert vector.std().item() == pytest.approx(1.0, rel=0.02)


def test_zero_update_leaves_as_noise() -> None:
    vector = torch.zeros(40_000)
    protect_update(vector, 1.0, 1.0, Noise())
    assert vector.std().item() == pytest.approx(1.0, rel=0.03)


def test_negative_multiplier_is_refused() -> None:
    with pytest.raises(PrivacyError, match="standard deviation"):
        protect_update(torch.ones(2), 1.0, -0.1, Noise())


def test_central_noise_is_sized_for_the_largest_weight() -> None:
    """Weights 900/50/50: noise for the mean weight has 0.37 of the stated multiplier, for the largest all."""
    samples = [900, 50, 50]
    largest = max(samples) / sum(samples)
    std = compute_central_noise_std(clip_norm=2.0, noise_multiplier=1.5, largest_weight=largest)
    most_one_site_can_move = largest * 2.0
    assert std / most_one_site_can_move == pytest.approx(1.5)
    sized_for_equal_weights = 1.5 * 2.0 / len(samples)
    assert sized_for_equal_weights / most_one_site_can_move == pytest.approx(0.37 * 1.5, rel=0.01)


@pytest.mark.parametrize(("clip_norm", "weight"), [(0.0, 0.5), (1.0, 0.0), (1.0, -0.1), (1.0, float("nan"))])
def test_central_noise_needs_both_bounds(clip_norm: float, weight: float) -> None:
    with pytest.raises(PrivacyError):
        compute_central_noise_std(clip_norm, 1.0, weight)


def test_effective_multiplier_of_each_mode() -> None:
    assert compute_effective_multiplier("client_local", 3.0) == 1.5
    assert compute_effective_multiplier("client_central", 3.0) == 3.0
    assert compute_effective_multiplier("sample", 3.0) == 3.0
    with pytest.raises(PrivacyError):
        compute_effective_multiplier("none", 3.0)
