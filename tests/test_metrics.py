"""Measures of class-incremental learning, by hand."""

import pytest

from server.metrics import (
    average_accuracy,
    average_incremental_accuracy,
    backward_transfer,
    balanced_accuracy,
    forgetting,
    task_accuracies,
)

MATRIX = [[0.9], [0.6, 0.8], [0.5, 0.7, 0.9]]


def test_the_hand_case() -> None:
    sizes = [10, 10, 10]
    assert [average_accuracy(row, sizes) for row in MATRIX] == pytest.approx([0.9, 0.7, 0.7])
    assert average_incremental_accuracy(MATRIX, sizes) == pytest.approx(0.766667, abs=1e-6)
    assert forgetting(MATRIX) == pytest.approx(0.25)
    assert backward_transfer(MATRIX) == pytest.approx(-0.25)
    assert forgetting([[0.5]]) is None
    assert backward_transfer([[0.5]]) is None


def test_sizes_weigh() -> None:
    assert average_accuracy([1.0, 0.0], [30, 10]) == pytest.approx(0.75)
    assert task_accuracies([3, 1, 0], [4, 4, 2], [0, 2, 3]) == ([0.5, 0.0], [8, 2])
    assert balanced_accuracy([3, 0, 0], [4, 0, 2]) == pytest.approx(0.375)
