"""The Bayesian estimator against hand-computed values, and what it refuses."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perennial.foundation.errors import PrivacyError
from perennial.privacy.bayesian import (
    ORDERS,
    BayesianAccountant,
    compute_scaled_divergence,
    estimate_invocation_cost,
)

distances = st.lists(st.floats(0.0, 2.0), min_size=3, max_size=20)


def run(
    values: np.ndarray, rounds: int = 50, noise: float = 4.0, failure: float = 1e-10
) -> BayesianAccountant:
    accountant = BayesianAccountant(rounds, failure)
    for _ in range(rounds):
        accountant.accumulate(values, noise)
    return accountant


def test_equal_distances_by_hand() -> None:
    """lambda (lambda + 1) d^2 / (2 s^2) = 4 * 5 / 8."""
    assert estimate_invocation_cost([1.0] * 5, 2.0, 1.0, 4, 1, failure_probability=None) == 2.5
    assert estimate_invocation_cost([1.0] * 5, 2.0, 1.0, 4, 1, failure_probability=0.05) == pytest.approx(
        2.5, abs=1e-12
    )


def test_subsampled_divergence_against_the_plain_sum() -> None:
    for order in (1, 2, 7):
        for rate in (0.01, 0.3):
            expected = math.log(
                sum(
                    math.comb(order + 1, k)
                    * rate**k
                    * (1 - rate) ** (order + 1 - k)
                    * math.exp((k * k - k) * 0.5 / 2)
                    for k in range(order + 2)
                )
            )
            found = compute_scaled_divergence(np.array([math.sqrt(0.5)]), 1.0, rate, order)[0]
            assert found == pytest.approx(expected, rel=1e-10)


def test_full_sampling_is_the_limit_of_subsampling() -> None:
    for order in (1, 5, 64):
        limit = compute_scaled_divergence(np.array([0.7]), 1.5, 1 - 1e-12, order)[0]
        assert limit == pytest.approx(
            compute_scaled_divergence(np.array([0.7]), 1.5, 1.0, order)[0], rel=1e-6
        )


@settings(deadline=None)
@given(distances, st.data())
def test_cost_rises_with_every_distance(values: list[float], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(values) - 1))
    raised = list(values)
    raised[position] += data.draw(st.floats(0.01, 1.0))

    def bare(of: list[float]) -> float:
        return estimate_invocation_cost(of, 2.0, 0.5, 3, 4, failure_probability=None)

    assert bare(raised) > bare(values) - 1e-12
    assert estimate_invocation_cost(values, 2.0, 0.5, 3, 4, failure_probability=1e-3) >= bare(values) - 1e-12


def test_all_distances_at_the_clip_norm_are_the_worst_case() -> None:
    """The older conversion of a Gaussian with z = 4 over 50 rounds, which no data can beat."""
    worst = run(np.ones(200)).epsilon(1e-5)
    by_hand = min(50 * (order + 1) / (2 * 4.0**2) - math.log(1e-5) / order for order in ORDERS)
    assert worst == pytest.approx(by_hand, rel=1e-3) == pytest.approx(10.09, rel=0.01)


def test_measured_values() -> None:
    """Distances Gamma(4, 0.05): bare mean, with the bound, and with all at the largest observed one."""
    values = np.minimum(np.random.Generator(np.random.PCG64(0)).gamma(4, 0.05, 200), 1.0)
    bare = min(
        (
            50 * estimate_invocation_cost(values, 4.0, 1.0, order, 50, failure_probability=None)
            - math.log(1e-5)
        )
        / order
        for order in ORDERS
    )
    assert bare == pytest.approx(4.53, rel=0.01)
    assert run(values).epsilon(1e-5) == pytest.approx(4.97, rel=0.01)
    assert run(np.full(200, values.max())).epsilon(1e-5) == pytest.approx(5.70, rel=0.01)


def test_one_invocation_too_many_is_refused() -> None:
    accountant = run(np.ones(3), rounds=2)
    with pytest.raises(PrivacyError, match="planned for 2 invocations"):
        accountant.accumulate(np.ones(3), 4.0)


def test_failure_probability_that_eats_delta_is_refused() -> None:
    accountant = run(np.ones(3), rounds=10, failure=1e-6)
    with pytest.raises(PrivacyError, match="lower failure_probability"):
        accountant.epsilon(9.9e-6)
    assert accountant.epsilon(1.1e-5) > 0
    assert accountant.failure == pytest.approx(1e-5, rel=1e-4)


@pytest.mark.parametrize(
    "values", [[], [1.0, 1.0], [1.0, 1.0, -0.1], [1.0, 1.0, float("nan")], [[1.0], [1.0], [1.0]]]
)
def test_bad_samples_of_distances_are_refused(values: list[float]) -> None:
    with pytest.raises(PrivacyError):
        BayesianAccountant(5, 1e-10).accumulate(values, 1.0)


@pytest.mark.parametrize(("planned", "failure"), [(0, 1e-10), (5, 1e-17), (5, 1.0)])
def test_bad_plans_are_refused(planned: int, failure: float) -> None:
    with pytest.raises(PrivacyError):
        BayesianAccountant(planned, failure)


def test_no_noise_is_refused() -> None:
    with pytest.raises(PrivacyError, match="needs noise"):
        BayesianAccountant(5, 1e-10).accumulate([1.0, 1.0, 1.0], 0.0)


def test_state_survives_a_restart() -> None:
    accountant = BayesianAccountant(4, 1e-10)
    accountant.accumulate([0.1, 0.2, 0.3], 1.0)
    restored = BayesianAccountant.restore(json.loads(json.dumps(accountant.state_dict())))
    for each in (accountant, restored):
        each.accumulate([0.3, 0.2, 0.1], 1.0)
    assert restored.epsilon(1e-5) == accountant.epsilon(1e-5)
    assert restored.invocations == 2
    with pytest.raises(PrivacyError, match="damaged"):
        BayesianAccountant.restore(accountant.state_dict() | {"invocations": 9})
