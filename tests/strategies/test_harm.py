"""The evidence by which a site is accused, and what it costs an honest one."""

from fractions import Fraction

import numpy as np
import pytest

from perennial.foundation.streams import stream
from perennial.learning.worth import Scores, balanced
from perennial.strategies.valuation.harm import HarmTest, evidence
from perennial.strategies.valuation.rollback import EARLIER, Rollback
from perennial.strategies.valuation.sweeps import ValuedTurn


def turn(
    site: str, held: list[int | None], change: list[float | None], norm: float, alignment: float | None
) -> ValuedTurn:
    """A turn at a model that is worth one half on each class."""
    return ValuedTurn(site, held, [0.5] * len(held), change, norm, alignment)


def test_evidence_by_hand() -> None:
    # 2 x the integral of p from 1/2 to 1, over 1/2: 3/2; of 1 - p: 1/2
    assert evidence(1, 1) == Fraction(3, 2)
    assert evidence(1, 0) == Fraction(1, 2)
    assert evidence(0, 0) == 1
    # 2 x the integral of p^2 from 1/2 to 1 is 7/12, over 1/4
    assert evidence(2, 2) == Fraction(7, 3)
    for worse, turns in ((3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="allowed 0 to 2"):
            evidence(turns, worse)


def test_evidence_is_a_martingale_of_a_fair_coin() -> None:
    for turns in range(30):
        for worse in range(turns + 1):
            after = (evidence(turns + 1, worse) + evidence(turns + 1, worse + 1)) / 2
            assert after == evidence(turns, worse)


def test_honest_sites_are_accused_no_more_often_than_promised_however_often_we_look() -> None:
    """The worst honest site: every turn is as likely to lose as to gain, and points that way."""
    coins = stream(1, "coins")
    accused, sites, turns = 0, 400, 200
    for _ in range(sites):
        test = HarmTest(false_alarm=0.05)
        others = [turn(name, [5, 3], [0.1, 0.1], 1.0, 0.3) for name in "bcd"]
        for step in coins.choice([-1.0, 1.0], size=turns):
            test.add([turn("a", [5, 3], [step, step], 1.0, step), *others])
            if test.accused():
                accused += 1
                break
    assert accused / sites < 0.05 + 3 * (0.05 * 0.95 / sites) ** 0.5


def test_a_site_is_judged_by_the_classes_that_it_holds() -> None:
    test = HarmTest()
    for _ in range(20):
        test.add(
            [
                turn("forgets others", [9, 0, 1], [0.1, -0.5, -0.1], 1.0, 0.3),
                *(turn(name, [5, 5, 5], [0.1, 0.1, 0.1], 1.0, 0.3) for name in "abcdefg"),
                turn("harms", [9, 0, 1], [-0.1, 0.5, 0.2], 1.0, -0.3),
                turn("overshoots", [9, 0, 1], [-0.1, 0.5, 0.2], 1.0, 0.3),
                turn("gains all the same", [9, 0, 1], [0.1, 0.5, 0.2], 1.0, -0.3),
                turn("withholds", [None, None, None], [-0.1, -0.1, -0.1], 1.0, -0.3),
                turn("unmeasured", [9, 0, 0], [None, 0.1, 0.1], 1.0, -0.3),
                turn("without direction", [9, 0, 0], [-0.1, 0.1, 0.1], 1.0, None),
            ]
        )
    found = test.accused()
    assert found.keys() == {"harms"} and found["harms"].flag == "harm"
    assert found["harms"].why == (
        "20 of 20 turns lost at the classes that the site trains on, and did not point where these call for"
    )
    resumed = HarmTest()
    resumed.load_state_dict(test.state_dict())
    assert resumed.accused() == test.accused()


def test_a_site_that_does_nothing_while_the_others_gain_is_accused_and_a_small_one_is_not() -> None:
    test = HarmTest()
    # where updates of length 1 gain 0.2 a tenth of that is 0.02, and 0.002 for one of length 0.1
    others = [turn(name, [5, 5], [0.2, 0.2], 1.0, 0.4) for name in "abcdefgh"]
    for number in range(20):
        now = number % 2
        test.add(
            [
                *others,
                turn("noise", [5, 5], [0.05, -0.02], 1.0, 0.01),
                turn("small", [1, 0], [0.003, -0.2], 0.1, 0.01),
                turn("noise, small", [1, 0], [0.001, 0.2], 0.1, 0.01),
                turn("easy classes", [5, 5], [0.001, 0.001], 1.0, 0.3),
                turn("now and then", [5, 5], [0.2 * now, 0.0], 1.0, 0.4 * now),
                turn("null", [5, 5], [0.0, 0.0], 0.0, 0.0),
            ]
        )
    found = test.accused()
    assert found.keys() == {"noise", "noise, small"}
    assert {accusation.flag for accusation in found.values()} == {"no gain"}
    assert found["noise"].why == (
        "20 of 20 turns did next to nothing for the classes that the site trains on"
    )


def test_turns_at_a_model_that_is_good_already_say_nothing() -> None:
    found = {}
    for worth in (0.94, 0.96):
        test = HarmTest()
        for _ in range(20):
            others = [turn(name, [5, 5], [0.2, 0.2], 1.0, 0.4) for name in "abcd"]
            # of the class that the site does not hold the model knows nothing
            idle = ValuedTurn("idle", [5, 0], [worth, 0.1], [-0.001, 0.3], 1.0, -0.2)
            test.add([*others, idle])
        found[worth] = test.accused(), test.behind("idle")
    assert found[0.94][0].keys() == {"idle"} and found[0.94][1] == 1.0
    assert found[0.96] == ({}, None)


def test_what_the_others_do_is_no_measure_where_they_are_few_or_do_nothing() -> None:
    few, late = HarmTest(), HarmTest()
    for number in range(64):
        few.add([turn("idle", [5], [0.0], 1.0, 0.0)] + [turn(s, [5], [0.2], 1.0, 0.3) for s in "ab"])
        # at the end of training half of the turns gain a little and half of them lose it
        signs = [(-1.0) ** (number >> bit) for bit in range(5)]
        late.add([turn(site, [5], [s], 1.0, s) for site, s in zip("abcde", signs, strict=True)])
    assert not few.accused()
    assert not late.accused()


def test_a_site_most_of_whose_updates_are_above_the_norm_bound_is_named() -> None:
    test = HarmTest()
    for number in range(20):
        test.add_norm("boosts", number > 0)
        test.add_norm("large", number % 2 == 0)
    found = test.accused()
    assert found.keys() == {"boosts"} and found["boosts"].flag == "norm"
    assert found["boosts"].why == "19 of 20 updates were above the norm bound (bounds.norm_multiple)"


def test_a_rollback_needs_history_looks_at_the_spread_and_ends() -> None:
    rollback = Rollback()
    for change in (0.3, -0.9, 0.2, 0.1):
        assert not rollback.refuses(1, change, 0.01), "too little is known"
    assert EARLIER == 4
    # median 0.15, median deviation 0.1, so the limit is -3 x (0.148^2 + 0.01^2)^0.5 = -0.446
    assert not rollback.refuses(1, -0.44, 0.01)
    rollback = Rollback(task=1, changes=[0.3, -0.9, 0.2, 0.1])
    assert rollback.refuses(1, -0.45, 0.01)
    assert rollback.refuses(1, -0.45, 0.01)
    assert not rollback.refuses(1, -0.45, 0.01), "a run whose data changed goes on"
    assert rollback.rounds == 2
    # a new task begins anew
    assert not rollback.refuses(2, -0.9, 0.01)


def test_scores_count_every_class_alike() -> None:
    labels = np.array([0, 0, 0, 2])
    before = Scores(4, labels, np.array([True, True, True, False]), np.array([0.9, 0.7, 0.8, 0.2]))
    after = Scores(4, labels, np.array([True, False, True, True]), np.array([0.9, 0.4, 0.8, 0.6]))
    assert before.by_class("accuracy") == [1.0, None, 0.0, None]
    assert before.balanced_accuracy == 0.5
    assert balanced(after.by_class("probability")) == pytest.approx((0.7 + 0.6) / 2)
    change, error = after.change(before, "probability")
    assert change == pytest.approx((-0.1 + 0.4) / 2)
    # variance 0.03 of three changes (0, -0.3, 0), of a mean 0.01; a class of one sample tells no variance
    assert error == pytest.approx(0.1 / 2)
    assert balanced([None, None]) == 0.0
