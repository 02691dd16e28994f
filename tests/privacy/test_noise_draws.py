"""The one source of noise: what it draws is what is claimed, and no process repeats another's draws.

`objections` looks at releases less their data, in units of the claimed standard deviation. It must find every
planted fault, and object to at most one of 200 honest runs.
"""

import math
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from scipy.special import chdtr, chdtrc, log_ndtr

from perennial.privacy.discrete_gaussian import draw_discrete_gaussian
from perennial.privacy.noise import Noise, add_noise
from perennial.privacy.protection import protect_update

SITES, ROUNDS, COORDINATES = 3, 6, 1024
LARGEST_ANDERSON_DARLING = 8.0
"""Passed by one honest run in 10,000, for a distribution without free parameters."""
LARGEST_Z = 4.5
LARGEST_OF_MANY = 5.5
"""Of some thousand z: passed by one honest run in 10,000."""
LEAST_P = 1e-4
Draws = NDArray[np.float64]
"""(SITES, ROUNDS, COORDINATES)."""


def objections(draws: Draws) -> list[str]:
    """What contradicts independent standard normal values."""
    found = []
    releases = draws.reshape(-1, draws.shape[-1])
    count, size = releases.shape
    if (distance := anderson_darling(releases)) > LARGEST_ANDERSON_DARLING:
        found.append(f"distribution: {distance:.1f}")
    for name, z in (
        ("mean", releases.mean() * math.sqrt(releases.size)),
        ("variance", (np.square(releases).mean() - 1) / math.sqrt(2 / releases.size)),
    ):
        if abs(z) > LARGEST_Z:
            found.append(f"{name}: {z:.1f}")
    squares = np.square(releases).sum(axis=0)
    least = min(float(chdtr(count, squares.min())), float(chdtrc(count, squares.max())))
    if 2 * size * least < LEAST_P:
        found.append(f"a coordinate: {2 * size * least:.1g}")
    between = np.abs(np.triu(releases @ releases.T / math.sqrt(size), 1)).max()
    if between > LARGEST_OF_MANY:
        found.append(f"two releases: {between:.1f}")
    spectrum = np.square(np.abs(np.fft.rfft(releases - releases.mean(axis=1, keepdims=True), axis=1)))
    lags = np.fft.irfft(spectrum, size, axis=1)[:, 1 : size // 2].sum(axis=0) / math.sqrt(count * size)
    if (lagged := float(np.abs(lags).max())) > LARGEST_OF_MANY:
        found.append(f"a lag: {lagged:.1f}")
    return found


def anderson_darling(values: Draws) -> float:
    """A^2 of the values against the standard normal distribution."""
    ordered = np.sort(values, axis=None)
    n = len(ordered)
    weights = 2 * np.arange(1, n + 1) - 1
    return -n - float((weights * (log_ndtr(ordered) + log_ndtr(-ordered[::-1]))).sum()) / n


def gaussian() -> Draws:
    """Each release in one call, as a site makes it."""
    shape = (COORDINATES,)
    return np.array([[Noise().normal(shape, 1.0).numpy() for _ in range(ROUNDS)] for _ in range(SITES)])


def of_updates() -> Draws:
    """What the mechanisms add to what they are given: protect_update, and add_noise of DP-SGD's steps."""

    def added(round_number: int) -> NDArray[np.float64]:
        vector = torch.zeros(COORDINATES, dtype=torch.float64)
        if round_number % 2:
            protect_update(vector, clip_norm=2.0, std=3.0, source=Noise())
        else:
            add_noise(vector, 3.0, Noise())
        return vector.numpy() / 3.0

    return np.array([[added(number) for number in range(ROUNDS)] for _ in range(SITES)])


def discrete() -> Draws:
    """Of sums and counts, on a grid of 20,000 steps a standard deviation."""
    std, words = 20_000, Noise()
    return np.array(
        [[draw_discrete_gaussian(COORDINATES, std, words) / std for _ in range(ROUNDS)] for _ in range(SITES)]
    )


@pytest.mark.parametrize("draw", [gaussian, of_updates, discrete], ids=lambda draw: draw.__name__)
def test_what_the_source_draws_is_what_is_claimed(draw: Callable[[], Draws]) -> None:
    # an honest source is objected to once in thousands of runs, so never twice in a row
    assert not (objections(draw()) and objections(draw()))


FAULTS: dict[str, Callable[[Draws], Draws]] = {
    "the same in every round": lambda draws: np.repeat(draws[:, :1], ROUNDS, axis=1),
    "the same at two sites": lambda draws: draws[[0, 0, 2]],
    "negated in the next round": lambda draws: np.stack([draws[:, ::2], -draws[:, ::2]], 2).reshape(
        draws.shape
    ),
    "rounded to half a deviation": lambda draws: np.round(2 * draws) / 2,
    "uniform": lambda draws: np.random.default_rng(1).uniform(-math.sqrt(3), math.sqrt(3), draws.shape),
    "two values": np.sign,
    "Laplace": lambda draws: np.random.default_rng(1).laplace(0, math.sqrt(0.5), draws.shape),
    "one coordinate in a hundred without": lambda draws: draws * (np.arange(COORDINATES) % 100 > 0),
    "nine tenths of the scale": lambda draws: 0.9 * draws,
    "one release without": lambda draws: draws * (np.arange(SITES * ROUNDS).reshape(SITES, ROUNDS, 1) != 15),
    "repeated after 300": lambda draws: np.concatenate([draws[..., :300]] * 2 + [draws[..., 600:]], axis=-1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    assert objections(FAULTS[fault](gaussian()))


def in_two_children(draw: Callable[[], bytes]) -> list[bytes]:
    """What two processes draw that were forked from this one."""
    found = []
    for _ in range(2):
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            os.write(write, draw())
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as said:
            found.append(said.read())
        os.waitpid(child, 0)
    return found


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_two_children_of_a_warm_process_draw_otherwise() -> None:
    words, noise = Noise(), Noise()
    _ = words.draw_words(64), noise.uniform(64)  # both are warm
    for draw in (
        lambda: words.draw_words(16).tobytes(),
        lambda: noise.uniform(16).numpy().tobytes(),
        lambda: draw_discrete_gaussian(16, 1000, words).tobytes(),
    ):
        first, second = in_two_children(draw)
        assert len(first) == len(second) == 128 and first != second


def test_uniform_choices_lie_in_the_half_open_interval() -> None:
    values = Noise().uniform(100_000)
    assert 0 < values.min().item() < 0.001
    assert 0.999 < values.max().item() <= 1
    assert stats.kstest(values.numpy(), "uniform").pvalue > 1e-6


def test_the_sum_is_rounded_once() -> None:
    """Adding in float32 would round the noise first and show the low bits of the data."""

    class Fixed:
        def normal(self, shape: tuple[int, ...], std: float) -> torch.Tensor:
            return torch.full(shape, 2.0**-25 * 1.5, dtype=torch.float64)

        def uniform(self, count: int) -> torch.Tensor:
            return torch.ones(count, dtype=torch.float64)

    vector = torch.tensor([2.0**-25 * 1.5 + 2.0**-40, 1.0])
    expected = (vector.double() + 2.0**-25 * 1.5).float()
    add_noise(vector, 1.0, Fixed())  # pyright: ignore[reportArgumentType]
    assert torch.equal(vector, expected)
