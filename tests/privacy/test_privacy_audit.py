"""Each mechanism against a distinguishing attack: the floor stays below the claim, under-noising is caught.

Every run hides or shows one record whose contribution has the largest norm that clipping lets through, and
the attacker looks along it, which is the best that any attacker can do against Gaussian noise. Claims are
audited at delta 0.05, where some thousand runs already come near them. The noise is seeded, so that a verdict
does not change from run to run.
"""

import math

import pytest
import torch
from torch import Tensor, nn

from perennial.foundation.streams import stream
from perennial.privacy.accountants import make_accountant
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.protection import (
    compute_central_noise_std,
    compute_effective_multiplier,
    protect_update,
)
from perennial.privacy.sample_level import PrivateGradient
from tests.privacy.distinguishing import audit, clopper_pearson
from tests.seeded_noise import SeededNoise

DELTA = 0.05
SOURCE = SeededNoise(stream(1, "dp-noise"))


def claimed(noise_multiplier: float, sample_rate: float = 1.0, steps: int = 1) -> float:
    return make_accountant("prv", [(noise_multiplier, sample_rate, steps)]).epsilon(DELTA)


def floor(with_record: Tensor, without: Tensor) -> float:
    return audit(with_record, without, DELTA, confidence=0.999).epsilon_floor


def local_scores(sign: float, noise_multiplier: float, runs: int) -> Tensor:
    """One coordinate of releases of an update far beyond the clip norm, along it (sign 1) or against it."""
    scores = torch.empty(runs)
    for run in range(runs):
        update = torch.tensor([sign * 50.0, 0.0, 0.0])
        protect_update(update, 2.0, 2.0 * noise_multiplier, SOURCE)
        scores[run] = update[0]
    return scores


def central_scores(present: bool, std: float, weights: list[float], runs: int) -> Tensor:
    """The noised weighted sum, along the update of the site with the largest weight, which may be absent."""
    total = sum(weights[1:]) * -0.1 + (weights[0] if present else 0.0)
    return SOURCE.normal((runs,), std) + total


def sample_scores(present: bool, noise_multiplier: float, runs: int) -> Tensor:
    """One DP-SGD step of a linear model for each run, along the gradient of a record that some runs hold."""
    model = nn.Linear(3, 1, bias=False).train()
    privacy = PrivacyConfig(mode="sample", sample_rate=0.1, clip_norm=1.0, noise_multiplier=noise_multiplier)
    x = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 5.0], [100.0, 0.0, 0.0]])[: 3 if present else 2]
    scores = torch.empty(runs)
    with PrivateGradient(model, privacy, 1.0, SOURCE) as private:
        for run in range(runs):
            private.compute(torch.arange(len(x)), lambda rows: model(x[rows])[:, 0])
            assert model.weight.grad is not None
            scores[run] = model.weight.grad[0, 0]
    return scores


def test_clopper_pearson_by_hand() -> None:
    """No hit in n trials: the upper bound is 1 - error^(1/n). All hits: the mirror image."""
    low, high = clopper_pearson([0, 100], 100, 0.025)
    assert low.tolist() == pytest.approx([0.0, 0.025 ** (1 / 100)])
    assert high.tolist() == pytest.approx([1 - 0.025 ** (1 / 100), 1.0])


def test_clopper_pearson_against_scipy() -> None:
    from scipy.stats import binomtest

    low, high = clopper_pearson(37, 120, 0.025)
    interval = binomtest(37, 120).proportion_ci(0.95, method="exact")
    assert (float(low), float(high)) == pytest.approx((interval.low, interval.high))


def test_without_noise_the_floor_is_what_the_runs_can_prove() -> None:
    runs = 2000
    sure = 0.0005 ** (1 / 1000)
    assert floor(torch.ones(runs), torch.zeros(runs)) == pytest.approx(math.log((sure - DELTA) / (1 - sure)))


def test_nothing_released_proves_nothing() -> None:
    draws = SOURCE.normal((2, 5000), 1.0)
    assert floor(draws[0], draws[1]) < 0.2
    assert floor(torch.zeros(100), torch.zeros(100)) == 0.0


@pytest.mark.parametrize("noise_multiplier", [0.5, 1.0, 3.0])
def test_the_floor_approaches_a_gaussians_true_epsilon_from_below(noise_multiplier: float) -> None:
    draws = SOURCE.normal((2, 20_000), noise_multiplier)
    found = floor(draws[0] + 1.0, draws[1])
    assert 0.2 * claimed(noise_multiplier) < found < claimed(noise_multiplier)


def test_both_directions_are_tested() -> None:
    """Scores that are rarely very low without the record: only a threshold from below shows it."""
    uniform = SOURCE.uniform(20_000)
    without = torch.where(uniform[:10_000] < 0.2, -1.0, 0.0)
    assert floor(torch.zeros(10_000), without) > 3


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 10"):
        audit(torch.zeros(9), torch.zeros(100), DELTA)


def test_client_local_keeps_its_claim_and_needs_the_factor_two() -> None:
    """Accounted with sigma instead of sigma / 2 the claim would be below what the attack proves."""
    sigma, runs = 1.0, 2500
    found = floor(local_scores(1, sigma, runs), local_scores(-1, sigma, runs))
    assert claimed(sigma) < found < claimed(compute_effective_multiplier("client_local", sigma))


def test_client_central_keeps_its_claim_whatever_the_weights() -> None:
    weights, sigma, runs = [0.9, 0.05, 0.05], 1.0, 20_000
    std = compute_central_noise_std(1.0, sigma, max(weights))
    found = floor(central_scores(True, std, weights, runs), central_scores(False, std, weights, runs))
    assert 1.0 < found < claimed(sigma)


def test_noise_for_equal_weights_is_caught_under_unequal_ones() -> None:
    weights, sigma, runs = [0.9, 0.05, 0.05], 1.0, 20_000
    std = compute_central_noise_std(1.0, sigma, 1 / len(weights))
    found = floor(central_scores(True, std, weights, runs), central_scores(False, std, weights, runs))
    assert found > claimed(sigma)


def test_sample_level_keeps_its_claim() -> None:
    runs = 400
    found = floor(sample_scores(True, 0.5, runs), sample_scores(False, 0.5, runs))
    assert 0.5 < found < claimed(0.5)


def test_under_noised_sample_level_is_caught() -> None:
    runs = 400
    found = floor(sample_scores(True, 0.2, runs), sample_scores(False, 0.2, runs))
    assert found > claimed(1.0)
