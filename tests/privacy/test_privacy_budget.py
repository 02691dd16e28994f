"""The fifth number of a budget, always on the safe side; and noise for digests from a stated epsilon."""

from dataclasses import replace

import pytest
from scipy.stats import norm

from perennial.foundation.errors import PrivacyError
from perennial.privacy.accountants import (
    compute_digest_l1_sensitivity,
    compute_digest_l2_sensitivity,
    make_accountant,
    solve_gaussian_multiplier,
)
from perennial.privacy.budget import Budget, Solved
from perennial.privacy.config import AccountantName

KNOWN = Budget(epsilon=8.0, delta=1e-5, noise_multiplier=None, sample_rate=1.0, steps=50)
WHOLE: dict[str, float] = {
    "epsilon": 8.0,
    "delta": 1e-5,
    "noise_multiplier": 4.3,
    "sample_rate": 1.0,
    "steps": 50,
}


def cost(solved: Solved, accountant: AccountantName) -> float:
    history = [(solved.noise_multiplier, solved.sample_rate, solved.steps)]
    return make_accountant(accountant, history).epsilon(solved.delta)


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
@pytest.mark.parametrize(
    ("missing", "stricter"), [("noise_multiplier", 1 / 1.02), ("delta", 1 / 1.2), ("steps", 1.05)]
)
def test_the_answer_holds_and_is_tight(missing: str, stricter: float, accountant: AccountantName) -> None:
    solved = Budget(**(WHOLE | {missing: None})).solve(accountant)  # pyright: ignore[reportArgumentType]
    assert cost(solved, accountant) <= 8.0
    value = getattr(solved, missing) * stricter
    less = replace(solved, **{missing: round(value) if missing == "steps" else value})
    assert cost(less, accountant) > 8.0 - 0.02


def test_sample_rate_for_a_budget() -> None:
    solved = Budget(epsilon=2.0, delta=1e-5, noise_multiplier=1.0, sample_rate=None, steps=20).solve("rdp")
    assert cost(solved, "rdp") <= 2.0 < cost(replace(solved, sample_rate=solved.sample_rate * 1.01), "rdp")


def test_solutions_agree_with_each_other() -> None:
    noise = KNOWN.solve("rdp").noise_multiplier
    again = Budget(epsilon=8.0, delta=1e-5, noise_multiplier=noise, sample_rate=1.0, steps=None).solve("rdp")
    assert again.steps == 50


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (WHOLE, "0 of epsilon"),
        (WHOLE | {"epsilon": None, "steps": None}, "epsilon, steps"),
        (WHOLE | {"steps": None, "epsilon": 0.0}, "epsilon is 0.0"),
        (WHOLE | {"steps": None, "epsilon": float("inf")}, "epsilon is inf"),
        (WHOLE | {"steps": None, "delta": 1.0}, "delta is 1.0"),
        (WHOLE | {"steps": None, "noise_multiplier": -1.0}, "noise_multiplier is -1.0"),
        (WHOLE | {"steps": None, "sample_rate": 1.5}, "sample_rate is 1.5"),
        (WHOLE | {"epsilon": None, "steps": 0}, "steps is 0"),
    ],
)
def test_badly_posed_budgets_are_refused(values: dict[str, float], reason: str) -> None:
    with pytest.raises(PrivacyError, match=reason):
        Budget(**values)  # pyright: ignore[reportArgumentType]


def test_a_budget_that_nothing_reaches_is_refused() -> None:
    with pytest.raises(PrivacyError, match="single step already costs more"):
        Budget(epsilon=0.5, delta=1e-5, noise_multiplier=0.5, sample_rate=1.0, steps=None).solve("rdp")


@pytest.mark.parametrize(("epsilon", "expected"), [(1.0, 3.731), (2.0, 1.994), (4.0, 1.081), (8.0, 0.600)])
def test_analytic_gaussian_anchors(epsilon: float, expected: float) -> None:
    multiplier = solve_gaussian_multiplier(epsilon, 1e-5)
    assert multiplier == pytest.approx(expected, abs=6e-4)
    mu = 1 / multiplier
    delta = norm.cdf(mu / 2 - epsilon / mu) - pow(2.718281828459045, epsilon) * norm.cdf(
        -mu / 2 - epsilon / mu
    )
    assert delta == pytest.approx(1e-5, rel=1e-5)


def test_analytic_gaussian_is_what_prv_charges_for_it() -> None:
    assert make_accountant("prv", [(solve_gaussian_multiplier(4.0, 1e-5), 1.0, 1)]).epsilon(
        1e-5
    ) == pytest.approx(4.0, abs=0.02)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 1e-5), (-1.0, 1e-5), (1.0, 0.0), (1.0, 1.0)])
def test_analytic_gaussian_refuses_what_no_noise_gives(epsilon: float, delta: float) -> None:
    with pytest.raises(PrivacyError):
        solve_gaussian_multiplier(epsilon, delta)


def test_digest_claims_by_hand() -> None:
    """Laplace scale tau / 100 on 256 features of a mixture of 4: a nominal 0.005 is an honest 6400."""
    sensitivity = compute_digest_l1_sensitivity(length=256, largest_value=1.0, largest_weight=0.25)
    assert sensitivity / 0.01 == pytest.approx(6400)
    assert compute_digest_l2_sensitivity(1.0, 0.25, non_negative=False) * solve_gaussian_multiplier(
        8.0, 1e-5
    ) == pytest.approx(0.30, abs=0.002)
    assert compute_digest_l2_sensitivity(1.0, 0.25, non_negative=True) == pytest.approx(0.3536, abs=1e-4)


@pytest.mark.parametrize("missing", ["noise_multiplier", "sample_rate", "steps", "delta"])
def test_an_epsilon_needs_the_other_four(missing: str) -> None:
    with pytest.raises(PrivacyError, match="from the other four"):
        replace(KNOWN, **{"noise_multiplier": 1.0, missing: None}).cost("rdp")
