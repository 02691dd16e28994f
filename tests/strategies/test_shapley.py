"""Shapley values of games whose answer is known."""

from itertools import permutations
from typing import Any

import numpy as np
import pytest

from perennial.foundation.streams import stream
from perennial.strategies.valuation.shapley import exact, over_permutations, shares, sweep_marginals

TOY = {(): 0, (0,): 10, (1,): 20, (2,): 30, (0, 1): 40, (0, 2): 50, (1, 2): 60, (0, 1, 2): 90}


def drawn_permutations(players, count, generator):
    return (generator.permutation(players) for _ in range(count))


def toy(members: frozenset[int]) -> float:
    return float(TOY[tuple(sorted(members))])


def drawn_game(players: int, seed: int) -> dict[frozenset[int], float]:
    values = stream(seed, "game").normal(size=2**players)
    sets = [frozenset(i for i in range(players) if row >> i & 1) for row in range(2**players)]
    return dict(zip(sets, values.tolist(), strict=True))


def every_order(players: int) -> list[np.ndarray]:
    return [np.array(order) for order in permutations(range(players))]


def test_the_values_of_a_hand_computed_game() -> None:
    assert exact(3, toy).tolist() == pytest.approx([20, 30, 40])


@pytest.mark.parametrize("players", [1, 2, 4, 5])
def test_all_orders_give_the_exact_values_and_their_sum_is_the_gain(players: int) -> None:
    game = drawn_game(players, players)
    phi = exact(players, game.__getitem__)
    assert over_permutations(players, game.__getitem__, every_order(players)) == pytest.approx(phi, abs=1e-12)
    everybody = frozenset(range(players))
    assert phi.sum() == pytest.approx(game[everybody] - game[frozenset()])


def test_no_more_orders_are_drawn_when_the_values_stand_still() -> None:
    drawn = []
    orders = (drawn.append(order) or order for order in drawn_permutations(3, 500, stream(1, "orders")))
    over_permutations(3, lambda members: float(len(members)), orders, stop=0.05)
    assert len(drawn) == 20


def test_what_is_no_game_is_refused() -> None:
    with pytest.raises(ValueError, match="found 13 players, allowed 1 to 12"):
        exact(13, toy)
    for order in ([0, 0, 1], [1, 1, 2], [2, 2, 2], [0, 1], [0, 1, 2, 3], [1, 2, 3]):
        with pytest.raises(ValueError, match=rf"found \[{', '.join(map(str, order))}\], no permutation"):
            over_permutations(3, toy, [np.array(order)])
    with pytest.raises(ValueError, match="found no permutation"):
        over_permutations(3, toy, [])


def test_shares_of_equal_sweeps_have_no_width_and_sum_to_one() -> None:
    share, low, high = shares(np.tile([3.0, 1.0, 0.0], (6, 1)))
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
        _, low, high = shares(marginals)
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
    rows = sweep_marginals(turns, [0.9, None], {1, 2})
    assert rows[0] == {"b": pytest.approx(0.3), "a": 0.0}
    assert rows[1] == {"a": pytest.approx(-0.1), "b": pytest.approx(0.6)}
    assert sum(value for row in rows for value in row.values()) == pytest.approx(0.9 - 0.1, abs=1e-12)
