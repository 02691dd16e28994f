"""The utility of a model on the held-out samples of each class."""

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
        """(n,) from 0 to 1: what the answer to each sample is worth."""
        return self.right.astype(np.float64) if utility == "accuracy" else self.probability

    def by_class(self, utility: Utility) -> list[float | None]:
        """(M,) mean of each class."""
        samples = np.bincount(self.labels, minlength=self.classes)
        sums = np.bincount(self.labels, self.values(utility), minlength=self.classes)
        return [float(s / n) if n else None for s, n in zip(sums, samples, strict=True)]

    @property
    def balanced_accuracy(self) -> float:
        return balanced(self.by_class("accuracy"))

    def change(self, before: "Scores", utility: Utility) -> tuple[float, float]:
        """(change of the balanced utility since before, its standard error), of the same samples."""
        moved = self.values(utility) - before.values(utility)
        found = [moved[self.labels == label] for label in np.unique(self.labels)]
        error = sum(float(rows.var(ddof=1)) / len(rows) for rows in found if len(rows) > 1) ** 0.5
        return float(np.mean([rows.mean() for rows in found])), error / len(found)


def balanced(worth: Worth) -> float:
    """The mean over classes with held-out samples, each of which counts alike; 0 without any."""
    known = [value for value in worth if value is not None]
    return sum(known) / len(known) if known else 0.0


def difference(after: Worth, before: Worth) -> list[float | None]:
    """(M,) after minus before; None where either is."""
    return [None if a is None or b is None else a - b for a, b in zip(after, before, strict=False)]
