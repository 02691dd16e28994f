"""Utility: how good a model's answers on held-out samples are, for each class."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Utility = Literal["accuracy", "probability"]
Worth = Sequence[float | None]
"""(M,) from 0 to 1: what a model is worth on each class; None for a class without held-out samples."""


@dataclass(frozen=True)
class Scores:
    """A model's answers on held-out samples.

    labels: (n,) int64, below `classes`. right: (n,) bool. probability: (n,) float64, of the true class.
    """

    classes: int
    labels: NDArray[np.int64]
    right: NDArray[np.bool_]
    probability: NDArray[np.float64]

    def values(self, utility: Utility) -> NDArray[np.float64]:
        """(n,) from 0 to 1: whether each answer is right, or the probability of the true class."""
        return self.right.astype(np.float64) if utility == "accuracy" else self.probability

    def by_class(self, utility: Utility) -> list[float | None]:
        """(M,) mean value of each class's samples; None for a class without samples."""
        samples = np.bincount(self.labels, minlength=self.classes)
        sums = np.bincount(self.labels, self.values(utility), minlength=self.classes)
        return [float(s / n) if n else None for s, n in zip(sums, samples, strict=True)]

    @property
    def balanced_accuracy(self) -> float:
        return balanced(self.by_class("accuracy"))

    def change(self, before: "Scores", utility: Utility) -> tuple[float, float]:
        """(balanced utility minus that of `before`, its standard error), both of the same samples."""
        moved = self.values(utility) - before.values(utility)
        found = [moved[self.labels == label] for label in np.unique(self.labels)]
        error = sum(float(rows.var(ddof=1)) / len(rows) for rows in found if len(rows) > 1) ** 0.5
        return float(np.mean([rows.mean() for rows in found])), error / len(found)


def balanced(worth: Worth) -> float:
    """Mean over the classes that have held-out samples, each class counting alike; 0 if there are none."""
    known = [value for value in worth if value is not None]
    return sum(known) / len(known) if known else 0.0


def difference(after: Worth, before: Worth) -> list[float | None]:
    """(M,) after minus before for each class; None if either is None."""
    return [None if a is None or b is None else a - b for a, b in zip(after, before, strict=False)]
