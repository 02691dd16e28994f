"""Measures of class-incremental learning, from the accuracy matrix.

A is a list of rows; row t has t columns: A[t-1][i-1] is the accuracy on the test samples of task i after task
t, predicting over all classes seen so far. sizes[i-1]: test samples of task i.

A cell without test samples is None, and so is every figure that would need it: what was not measured is
neither zero nor left out of a mean.
"""

from collections.abc import Sequence
from itertools import pairwise

Row = Sequence[float | None]


def average_accuracy(row: Row, sizes: Sequence[int]) -> float | None:
    """Accuracy on all seen classes: the row's mean weighted by test samples."""
    known = _complete(row)
    return sum(a * size for a, size in zip(known, sizes, strict=True)) / sum(sizes) if known else None


def average_incremental_accuracy(averages: Row) -> float | None:
    """Mean over tasks of the accuracy on all classes seen so far (Rebuffi et al. 2017, arXiv 1611.07725).

    averages: average_accuracy after each task.
    """
    return _mean(averages)


def compute_forgetting(matrix: Sequence[Row]) -> float | None:
    """Mean over earlier tasks of the best accuracy before minus the accuracy now; None after one task.

    May be negative. Chaudhry et al. 2018 (arXiv 1801.10112).
    """
    last = len(matrix) - 1
    best = [max(_complete([row[task] for row in matrix[task:last]]), default=None) for task in range(last)]
    return _mean([_change(before, now) for before, now in zip(best, matrix[-1], strict=False)])


def compute_backward_transfer(matrix: Sequence[Row]) -> float | None:
    """Mean over earlier tasks of accuracy now minus accuracy right after the task; None after one task.

    Lopez-Paz and Ranzato 2017 (arXiv 1706.08840).
    """
    learned = [row[-1] for row in matrix[:-1]]
    return _mean([_change(now, then) for now, then in zip(matrix[-1], learned, strict=False)])


def compute_task_accuracies(
    correct: Sequence[int], total: Sequence[int | None], boundaries: Sequence[int]
) -> tuple[list[float | None], list[int]]:
    """(accuracy, samples) of each task, from right answers and samples of each class.

    boundaries: 0, M_1, ..., M_t.
    A class whose samples are None was reported by no site, and its task has no accuracy.
    """
    accuracies: list[float | None] = []
    sizes = []
    for low, high in pairwise(boundaries):
        known = [samples for samples in total[low:high] if samples is not None]
        size = sum(known)
        accuracies.append(sum(correct[low:high]) / size if size and len(known) == high - low else None)
        sizes.append(size)
    return accuracies, sizes


def compute_overall_accuracy(
    correct: Sequence[int], total: Sequence[int], boundaries: Sequence[int]
) -> float | None:
    """Right answers over samples, all classes together; None where a task has no samples."""
    _, sizes = compute_task_accuracies(correct, total, boundaries)
    return sum(correct) / sum(total) if all(sizes) else None


def compute_balanced_accuracy(correct: Sequence[int], total: Sequence[int | None]) -> float | None:
    """Mean of the classes' accuracies over the classes with samples.

    None without samples, or if some class's counts are not known.
    """
    if None in total:
        return None
    recalls = [c / t for c, t in zip(correct, total, strict=True) if t]
    return sum(recalls) / len(recalls) if recalls else None


def is_unbalanced(total: Sequence[int | None]) -> bool:
    """Whether one class has over three times another's samples, so that plain accuracy favours large classes.

    Classes without samples, or with an unknown number of them, are left out.
    """
    known = [samples for samples in total if samples]
    return bool(known) and max(known) > 3 * min(known)


def _complete(values: Row) -> list[float]:
    """The values; none of them where one is missing."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []


def _mean(values: Row) -> float | None:
    """None without values and where one is missing."""
    known = _complete(values)
    return sum(known) / len(known) if known else None


def _change(end: float | None, start: float | None) -> float | None:
    return None if end is None or start is None else end - start
