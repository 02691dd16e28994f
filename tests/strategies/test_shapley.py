"""Marginals of sweeps, and shares with their bounds, whose answer is known."""

from typing import Any

import numpy as np
import pytest

from perennial.foundation.streams import stream
from perennial.strategies.contribution import compute_marginals, compute_shares


def test_shares_of_equal_sweeps_have_no_width_and_sum_to_one() -> None:
    share, low, high = compute_shares(np.tile([3.0, 1.0, 0.0], (6, 1)))
    assert share.tolist() == [0.75, 0.25, 0.0]
    assert low.tolist() == pytest.approx(share.tolist())
    assert high.tolist() == pytest.approx(share.tolist())


@pytest.mark.parametrize("sweeps", [4, 8, 30])
def test_each_bound_of_a_share_covers_at_the_number_of_sweeps_that_there_are(sweeps: int) -> None:
    """Gains shrink as a run goes on, and turns are skewed: the truth is a share of 0.3."""
    draws, expected = stream(sweeps, "coverage"), np.array([0.3, 0.5, 0.2])
    missed = np.zeros(2)
    repeats = 2000
    for _ in range(repeats):
        sizes = 1 / np.sqrt(np.arange(1, sweeps + 1))
        noise = draws.gamma(2.0, 0.5, size=(sweeps, 3)) - 1.0
        marginals = sizes[:, None] * (expected + 0.3 * noise)
        _, low, high = compute_shares(marginals)
        missed += [low[0] > 0.3, high[0] < 0.3]
    # 5 % either way, give or take three standard errors of 2,000 repeats and a little skewness
    assert (missed / repeats < 0.05 + 3 * (0.05 * 0.95 / repeats) ** 0.5 + 0.02).all(), missed / repeats
    assert (missed / repeats > 0.002).any(), "bounds that never miss say nothing"


def test_marginals_of_a_sweep_telescope() -> None:
    turns: list[dict[str, Any]] = [
        {"site": "b", "sweep": 1, "worth": 0.1},
        {"site": "a", "sweep": 1, "worth": 0.4},
        {"site": "a", "sweep": 2, "worth": 0.4},
        {"site": "b", "sweep": 2, "worth": 0.3},
    ]
    for turn in turns:
        turn["worth"] = [turn["worth"], None]
    rows = compute_marginals(turns, [0.9, None], {1, 2})
    assert rows[0] == {"b": pytest.approx(0.3), "a": 0.0}
    assert rows[1] == {"a": pytest.approx(-0.1), "b": pytest.approx(0.6)}
    assert sum(value for row in rows for value in row.values()) == pytest.approx(0.9 - 0.1, abs=1e-12)
