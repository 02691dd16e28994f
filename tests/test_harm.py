"""The evidence by which a site is accused, and what it costs an honest one."""

from fractions import Fraction

import numpy as np
import pytest

from perennial.foundation.streams import stream
from perennial.learning.worth import Scores, balanced
from perennial.strategies.valuation.harm import HarmTest, evidence
from perennial.strategies.valuation.rollback import EARLIER, Rollback


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
    """The worst honest site: every turn is as likely to make its classes worse as better."""
    coins = stream(1, "coins")
    accused, sites, turns = 0, 400, 200
    for _ in range(sites):
        test = HarmTest(false_alarm=0.05)
        steps = coins.choice([-1.0, 1.0], size=(turns, 3))
        for step in steps:
            test.add("a", [5, 3, 2], step.tolist())
            if test.accused(classes=3):
                accused += 1
                break
    assert accused / sites < 0.05 + 3 * (0.05 * 0.95 / sites) ** 0.5


def test_a_site_is_judged_by_the_classes_that_it_holds() -> None:
    test = HarmTest()
    for _ in range(20):
        test.add("forgets others", [9, 0, 1], [0.1, -0.5, -0.1])
        test.add("harms", [9, 0, 1], [-0.1, 0.5, 0.2])
        test.add("harms one", [4, 4, 4], [0.3, 0.3, -0.1])
        test.add("withholds", [None, None, None], [-0.1, -0.1, -0.1])
        test.add("unmeasured", [9, 0, 0], [None, 0.1, 0.1])
        test.add("unchanged", [9, 1, 1], [0.0, 0.0, 0.0])
    found = test.accused(classes=3)
    assert found.keys() == {"harms", "harms one"}
    assert found["harms"].why == "20 of 20 turns made the model worse at the classes that it trains on"
    assert "class 2, one of those that it trains on" in found["harms one"].why
    assert {accusation.flag for accusation in found.values()} == {"harm"}
    resumed = HarmTest()
    resumed.load_state_dict(test.state_dict())
    assert resumed.accused(classes=3) == found


def test_a_site_most_of_whose_updates_are_above_the_norm_bound_is_named() -> None:
    test = HarmTest()
    for number in range(20):
        test.add_norm("boosts", number > 0)
        test.add_norm("large", number % 2 == 0)
    found = test.accused(classes=10)
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
