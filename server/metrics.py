"""Measures of class-incremental learning, from the accuracy matrix.

A is a list of rows; row t has t columns: A[t-1][i-1] is the accuracy on the test samples of task i after task
t, predicting over all classes seen so far. sizes[i-1]: test samples of task i.
"""

from collections.abc import Sequence
from itertools import pairwise


def average_accuracy(row: Sequence[float], sizes: Sequence[int]) -> float:
    """Accuracy on all seen classes: the row's mean weighted by test samples."""
    total = sum(sizes[: len(row)])
    return sum(accuracy * size for accuracy, size in zip(row, sizes, strict=False)) / total if total else 0.0


def average_incremental_accuracy(matrix: Sequence[Sequence[float]], sizes: Sequence[int]) -> float:
    """Mean over tasks of the accuracy on all classes seen so far (Rebuffi et al. 2017, arXiv 1611.07725)."""
    return sum(average_accuracy(row, sizes) for row in matrix) / len(matrix)


def forgetting(matrix: Sequence[Sequence[float]]) -> float | None:
    """Mean over earlier tasks of the best accuracy before minus the accuracy now; may be negative; None after
    one task.

    Chaudhry et al. 2018 (arXiv 1801.10112).
    """
    last = len(matrix) - 1
    if last < 1:
        return None
    drops = [max(row[task] for row in matrix[task:last]) - matrix[last][task] for task in range(last)]
    return sum(drops) / last


def backward_transfer(matrix: Sequence[Sequence[float]]) -> float | None:
    """Mean over earlier tasks of the accuracy now minus that right after learning; None after one task.

    Lopez-Paz and Ranzato 2017 (arXiv 1706.08840).
    """
    last = len(matrix) - 1
    if last < 1:
        return None
    return sum(matrix[last][task] - matrix[task][task] for task in range(last)) / last


def task_accuracies(
    correct: Sequence[int], total: Sequence[int], boundaries: Sequence[int]
) -> tuple[list[float], list[int]]:
    """(accuracy, samples) of each task, from right answers and samples of each class; boundaries: 0, M_1,
    ..., M_t."""
    accuracies, sizes = [], []
    for low, high in pairwise(boundaries):
        size = sum(total[low:high])
        accuracies.append(sum(correct[low:high]) / size if size else 0.0)
        sizes.append(size)
    return accuracies, sizes


def balanced_accuracy(correct: Sequence[int], total: Sequence[int]) -> float | None:
    """Mean over classes with samples of the class's accuracy; None without samples."""
    recalls = [c / t for c, t in zip(correct, total, strict=True) if t]
    return sum(recalls) / len(recalls) if recalls else None
