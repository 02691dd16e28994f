"""Measures of class-incremental learning, by hand."""

import json

import pytest

from perennial.server.metrics import (
    average_accuracy,
    average_incremental_accuracy,
    compute_backward_transfer,
    compute_forgetting,
)
from perennial.server.rounds import History
from perennial.server.summary import list_measured_rounds
from perennial.strategies.round.context import RoundOutcome
from perennial.strategies.round.gate import Admitted

MATRIX = [[0.9], [0.6, 0.8], [0.5, 0.7, 0.9]]


def test_the_hand_case() -> None:
    averages = [average_accuracy(row, [10] * len(row)) for row in MATRIX]
    assert averages == pytest.approx([0.9, 0.7, 0.7])
    assert average_incremental_accuracy(averages) == pytest.approx(0.766667, abs=1e-6)
    assert compute_forgetting(MATRIX) == pytest.approx(0.25)
    assert compute_backward_transfer(MATRIX) == pytest.approx(-0.25)
    assert compute_forgetting([[0.5]]) is None
    assert compute_backward_transfer([[0.5]]) is None


def test_a_hole_reaches_the_measures_that_need_it_and_no_other() -> None:
    at_the_end = [[0.9], [0.6, 0.8], [None, None, None]]
    assert (compute_forgetting(at_the_end), compute_backward_transfer(at_the_end)) == (None, None)
    of_the_newest = [[0.9], [0.6, 0.8], [0.5, 0.7, None]]
    assert compute_forgetting(of_the_newest) == pytest.approx(0.25)
    assert compute_backward_transfer(of_the_newest) == pytest.approx(-0.25)
    # the best before may have been in the hole; what followed learning was measured
    between = [[0.9], [None, 0.8], [0.5, 0.7, 0.9]]
    assert compute_forgetting(between) is None
    assert compute_backward_transfer(between) == pytest.approx(-0.25)


def test_what_rounds_measured_stands_in_the_journal_and_not_in_the_checkpoint() -> None:
    history = History({"by_round": [[0.5, 10]]})
    reply = Admitted("a", {}, 1.0, 7)
    history.round_done(RoundOutcome(participants={"a": reply}, bytes_up=100, bytes_down=200))
    sizes = []
    for _ in range(2):
        history.round_done(RoundOutcome(participants={"a": reply}, bytes_up=100, bytes_down=200))
        # the losses are those of the latest task alone
        sizes.append(len(json.dumps(history.data | {"losses": []})))
    assert len(set(sizes)) == 1
    events = [
        {"event": "round", "accuracy": None, "bytes_up": 3, "bytes_down": 4},
        {"event": "note", "text": "a site failed"},
        {"event": "round", "accuracy": 0.5, "bytes_up": 3, "bytes_down": 4},
        {"event": "round", "accuracy": 0.7, "bytes_up": 1, "bytes_down": 1},
    ]
    assert list_measured_rounds(events) == [(0.5, 14), (0.7, 16)]
