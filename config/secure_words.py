"""How values become the integers of a masked sum, and an opened sum becomes values again.

Both sides of the wire use it. Statistics beside updates are 64-bit words.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perennial.config.experiment import Experiment
from perennial.models.sum_grid import SumGrid
from perennial.privacy.discrete_gaussian import Integers
from perennial.privacy.noised_counts import in_samples
from perennial.privacy.secure.masks import Words
from perennial.privacy.shared_noise import UNIT, SharedNoise

CLASS_SUM_STEP = 2.0**-40
"""Of sums of unit features: 2^23 samples of a class fit."""


@dataclass(frozen=True)
class UpdateWords:
    """The words of an update: its values on the public grid, then its weight.

    Under adaptive clipping one more word says whether the update was within the clip norm. Tensors are in the
    order of their names.

    updates: sites that the sum has room for.
    clip_norm: of this round, under client_shared.
    """

    experiment: Experiment
    updates: int
    clip_norm: float | None = None

    @property
    def dtype(self) -> Any:
        """Of the words."""
        return np.uint64 if self.experiment.sums.bits == 64 else np.uint32

    @property
    def noise(self) -> SharedNoise | None:
        """The sites' noise; None but under client_shared."""
        experiment = self.experiment
        if experiment.privacy.mode != "client_shared" or experiment.secure is None:
            return None
        return SharedNoise.of(
            experiment.privacy,
            self.clip_norm,
            sites=self.updates,
            honest=experiment.secure.honest,
            bits=experiment.sums.bits,
        )

    @property
    def counts_within(self) -> bool:
        """Whether the last word says if the update was within the clip norm."""
        return self.noise is not None and self.experiment.privacy.adaptive_clipping is not None

    def weight(self, num_examples: int) -> int:
        """How much an update counts: an integer that the site multiplies in."""
        fixed = self.experiment.privacy.mode in ("client_central", "client_shared")
        if fixed or self.experiment.strategy.asks.counts_alike:
            return 1
        return min(num_examples, self.experiment.bounds.max_samples)

    @property
    def grid(self) -> SumGrid:
        """Of sums without shared noise."""
        largest = self.weight(self.experiment.bounds.max_samples)
        return self.experiment.sums.grid(self.updates, float(largest))

    def encode(self, update: Mapping[str, Tensor], weight: int, within: bool | None) -> Words:
        """(P + 1 or 2,) words of one site, without noise.

        Raises OverflowError for an update that the grid has no room for.
        """
        noise = self.noise
        if noise is None:
            steps = self.grid.integers(update, weight)
        else:
            steps = {
                name: tensor.double().div(noise.step).trunc().to(torch.int64)
                for name, tensor in update.items()
            }
        values = [steps[name].reshape(-1).cpu() for name in sorted(update)]
        tail = [weight] + ([UNIT if within else -UNIT] if noise is not None and self.counts_within else [])
        whole = torch.cat([*values, torch.tensor(tail, dtype=torch.int64)])
        return whole.numpy().astype(self.dtype)

    def decode(self, words: Words, like: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int, float]:
        """(sum of weighted updates in float64, sum of weights, count) of opened words.

        count: half the number of updates within the clip norm less half that of the others.

        like: the model's tensors. Raises ValueError when there are not as many words.
        """
        signed = words.view(np.int64 if self.dtype == np.uint64 else np.int32).astype(np.int64)
        # by name, since tensors come in another order from a checkpoint than from a model
        names = sorted(like)
        sizes = [like[name].numel() for name in names]
        tail = 1 + self.counts_within
        if len(signed) != sum(sizes) + tail:
            raise ValueError(f"words: found {len(signed)}, expected {sum(sizes) + tail}")
        noise = self.noise
        step = self.grid.step if noise is None else noise.step
        values = torch.from_numpy(signed[: sum(sizes)]).to(torch.float64).mul_(step)
        parts = values.split(sizes)
        total = {name: part.view(like[name].shape) for name, part in zip(names, parts, strict=True)}
        within = float(signed[-1]) / (2 * UNIT) if noise is not None and self.counts_within else 0.0
        return total, int(signed[sum(sizes)]), within


def integer_words(*tensors: Tensor) -> Words:
    """(N,) words of integer tensors of any shapes, one after the other.

    With integers_of() on the other side, any integers can go through a masked
    sum; docs/architecture.md says how.
    """
    return torch.cat([tensor.to(torch.int64).cpu().reshape(-1) for tensor in tensors]).numpy().view(np.uint64)


def integers_of(words: Words, *shapes: tuple[int, ...]) -> list[Tensor]:
    """int64 tensors of these shapes, of a sum of integer_words(). Raises ValueError for another number."""
    sizes = [math.prod(shape) for shape in shapes]
    if len(words) != sum(sizes):
        raise ValueError(f"words: found {len(words)}, expected {sum(sizes)}")
    parts = torch.from_numpy(words.view(np.int64).copy()).split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def share_of_noise(experiment: Experiment, multiplier: float) -> float:
    """Noise multiplier of one site's part of the noise on sums of features: all of it if none is shared."""
    if not experiment.privacy.shared or experiment.secure is None:
        return multiplier
    return multiplier / math.sqrt(experiment.secure.honest)


def statistics_subject(features: str, class_order: str, task: int, weights: Sequence[int] | None) -> str:
    """What sums of features of one task are about, as SHA-256.

    features, class_order: SHA-256 of the maps and of the order of the classes.
    """
    return sha256(json.dumps([features, class_order, task, weights]).encode()).hexdigest()


def count_words(correct: Sequence[int], total: Sequence[int], beside: Sequence[int] = ()) -> Words:
    """(2 M + n,) words of exact counts of each class, and of n more counts."""
    return np.array([*correct, *total, *beside], dtype=np.uint64)


def cell_words(cells: Integers) -> Words:
    """(2 M,) words of noised counts, right and wrong ones of each class, in steps."""
    return cells.view(np.uint64)


def counts_of(
    words: Words, classes: int, *, noised: bool, beside: int = 0
) -> tuple[list[int], list[int], list[int]]:
    """Right answers and samples of each class and other counts, of the sum of count_words().

    noised: of cell_words(), which have none beside them. beside: how many there are.
    Raises ValueError when it is not that.
    """
    if len(words) != 2 * classes + beside:
        raise ValueError(f"words: found {len(words)}, expected {2 * classes + beside}")
    if noised:
        return *in_samples(words.view(np.int64)), []
    numbers = [int(word) for word in words]
    correct, total, others = numbers[:classes], numbers[classes : 2 * classes], numbers[2 * classes :]
    if any(a > b for a, b in zip(correct, total, strict=True)) or max(total + others) >= 2**62:
        raise ValueError("counts: they are no sum of right answers and samples of each class")
    return correct, total, others


def class_sum_words(sums: Mapping[str, Tensor]) -> Words:
    """(M d + M,) words of `sums` (M, d) and `counts` (M,)."""
    return integer_words(sums["sums"].double().cpu().div(CLASS_SUM_STEP).round(), sums["counts"].round())


def class_sums_of(words: Words, classes: int, width: int) -> tuple[Tensor, Tensor]:
    """((M, d) float64, (M,) int64) of opened words. Raises ValueError when there are not as many."""
    sums, counts = integers_of(words, (classes, width), (classes,))
    return sums.to(torch.float64).mul_(CLASS_SUM_STEP), counts
