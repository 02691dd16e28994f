"""Noise: the right distribution, independent draws, a secure source that a fork does not repeat."""

import math
import os

import numpy as np
import pytest
import torch
from scipy import stats

from perennial.foundation.streams import stream
from perennial.privacy.noise import (
    NoiseSource,
    SecureNoise,
    SeededNoise,
    add_noise,
)


@pytest.fixture(params=["secure", "seeded"])
def source(request: pytest.FixtureRequest) -> NoiseSource:
    return SecureNoise() if request.param == "secure" else SeededNoise(stream(1, "dp-noise"))


def test_standard_deviation_within_one_percent(source: NoiseSource) -> None:
    sigma, clip_norm = 1.3, 0.7
    vector = torch.zeros(100_000)
    add_noise(vector, sigma * clip_norm, source)
    # the standard deviation of this estimate is 0.22 %, so 1 % is 4.5 of them
    assert vector.std().item() == pytest.approx(sigma * clip_norm, rel=0.01)
    assert abs(vector.mean().item()) < 5 * sigma * clip_norm / math.sqrt(len(vector))


def test_values_are_gaussian_and_uncorrelated(source: NoiseSource) -> None:
    values = source.normal((200_000,), 1.0).numpy()
    assert stats.kstest(values, "norm").pvalue > 1e-6
    for lag in (1, 8192, 100_000):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 5 / math.sqrt(len(values) - lag)
    assert abs(stats.kurtosis(values)) < 5 * math.sqrt(24 / len(values))


def test_uniform_choices_lie_in_the_half_open_interval(source: NoiseSource) -> None:
    values = source.uniform(100_000)
    assert 0 < values.min().item() < 0.001
    assert 0.999 < values.max().item() <= 1
    assert stats.kstest(values.numpy(), "uniform").pvalue > 1e-6


def test_seeded_noise_repeats_and_secure_noise_does_not() -> None:
    def seeded() -> torch.Tensor:
        return SeededNoise(stream(3, "dp-noise", 4)).normal((8,), 1.0)

    assert torch.equal(seeded(), seeded())
    assert not torch.equal(SecureNoise().normal((8,), 1.0), SecureNoise().normal((8,), 1.0))
    assert (SecureNoise().name, SeededNoise(stream(3, "dp-noise")).name) == ("secure", "seeded")


def test_a_forked_process_does_not_repeat_its_parent() -> None:
    source = SecureNoise()
    source.normal((1,), 1.0)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, source.uniform(4).numpy().tobytes())
        os._exit(0)
    parent = source.uniform(4).numpy().tobytes()
    os.waitpid(child, 0)
    assert os.read(reader, 64) != parent
    os.close(reader)
    os.close(writer)


def test_the_sum_is_rounded_once() -> None:
    """Adding in float32 would round the noise first and show the low bits of the data."""

    class Fixed:
        name = "seeded"

        def normal(self, shape: tuple[int, ...], std: float) -> torch.Tensor:
            return torch.full(shape, 2.0**-25 * 1.5, dtype=torch.float64)

        def uniform(self, count: int) -> torch.Tensor:
            return torch.ones(count, dtype=torch.float64)

    vector = torch.tensor([2.0**-25 * 1.5 + 2.0**-40, 1.0])
    expected = (vector.double() + 2.0**-25 * 1.5).float()
    add_noise(vector, 1.0, Fixed())  # pyright: ignore[reportArgumentType]
    assert torch.equal(vector, expected)
