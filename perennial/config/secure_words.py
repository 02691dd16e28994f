"""How values become the integers of a masked sum, and an opened sum becomes values again.

Both sides of the wire use it. Statistics beside updates are 64-bit words.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

from perennial.config.experiment import Experiment
from perennial.config.rounds import MAX_SAMPLES
from perennial.models.sum_grid import SumGrid
from perennial.privacy.discrete_gaussian import Integers
from perennial.privacy.noised_counts import round_to_samples
from perennial.privacy.secure.keys import Words
from perennial.privacy.shared_noise import SharedNoise


@dataclass(frozen=True)
class UpdateWords:
    """Conversion of updates to the integers of a masked sum, and back: P values, then the weight.

    Tensors are in the order of their names. updates: most updates in the sum.
    """

    experiment: Experiment
    updates: int

    @property
    def noise(self) -> SharedNoise | None:
        """The noise that sites share in mode client_shared; None in other modes."""
        experiment = self.experiment
        if experiment.privacy.mode != "client_shared" or experiment.secure is None:
            return None
        return SharedNoise.of(experiment.privacy, sites=self.updates, honest=experiment.secure.honest)

    def weight(self, num_examples: int) -> int:
        """Weight of an update: 1 where all count alike, else num_examples up to MAX_SAMPLES."""
        fixed = self.experiment.privacy.mode in ("client_central", "client_shared")
        if fixed or self.experiment.strategy.asks.counts_alike:
            return 1
        return min(num_examples, MAX_SAMPLES)

    @property
    def grid(self) -> SumGrid:
        """The grid on which updates are rounded when sites do not share noise."""
        largest = self.weight(MAX_SAMPLES)
        return SumGrid(max(1, self.updates), float(largest))

    def encode(self, update: Mapping[str, Tensor], weight: int) -> Words:
        """(P + 1,) words of one site, without noise.

        Raises OverflowError for an update that is too large for the grid.
        """
        noise = self.noise
        if noise is None:
            steps = self.grid.quantise(update, weight)
        else:
            steps = {
                name: tensor.double().div(noise.step).trunc().to(torch.int64)
                for name, tensor in update.items()
            }
        values = [steps[name].reshape(-1).cpu() for name in sorted(update)]
        return torch.cat([*values, torch.tensor([weight])]).numpy().view(np.uint64)

    def decode(self, words: Words, like: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
        """(sum of weighted updates in float64, sum of weights) from the words of an opened sum.

        like: tensors of the model's names and shapes. Raises ValueError on another number of words.
        """
        signed = words.view(np.int64)
        # by name, since tensors come in another order from a checkpoint than from a model
        names = sorted(like)
        sizes = [like[name].numel() for name in names]
        if len(signed) != (expected := count_update_words(like)):
            raise ValueError(f"words: found {len(signed)}, expected {expected}")
        noise = self.noise
        step = self.grid.step if noise is None else noise.step
        values = torch.from_numpy(signed[: sum(sizes)]).to(torch.float64).mul_(step)
        parts = values.split(sizes)
        total = {name: part.view(like[name].shape) for name, part in zip(names, parts, strict=True)}
        return total, int(signed[-1])


def count_update_words(like: Mapping[str, Tensor]) -> int:
    """Words of an update of tensors as in `like`, with those of its weight."""
    return sum(tensor.numel() for tensor in like.values()) + 1


def encode_integers(*tensors: Tensor) -> Words:
    """(N,) words of integer tensors of any shapes, one tensor after the other.

    decode_integers() reverts it, so any integers can be masked; see docs/secure_aggregation.md.
    """
    return torch.cat([tensor.to(torch.int64).cpu().reshape(-1) for tensor in tensors]).numpy().view(np.uint64)


def decode_integers(words: Words, *shapes: tuple[int, ...]) -> list[Tensor]:
    """int64 tensors of these shapes from a sum of integer_words(). Raises ValueError on a misfit."""
    sizes = [math.prod(shape) for shape in shapes]
    if len(words) != sum(sizes):
        raise ValueError(f"words: found {len(words)}, expected {sum(sizes)}")
    parts = torch.from_numpy(words.view(np.int64).copy()).split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def share_of_noise(experiment: Experiment, multiplier: float) -> float:
    """Noise multiplier for one site's part of the noise on sums of features: all of it if none is shared.

    multiplier: of the whole noise.
    """
    if not experiment.privacy.shared or experiment.secure is None:
        return multiplier
    return multiplier / math.sqrt(experiment.secure.honest)


def hash_statistics_subject(features: str, class_order: str, task: int, weights: Sequence[int] | None) -> str:
    """SHA-256 that names one task's sums of features as the subject of a masked sum.

    features, class_order: SHA-256 of the maps and of the order of classes. weights: of classes, if any.
    """
    return sha256(json.dumps([features, class_order, task, weights]).encode()).hexdigest()


def encode_counts(correct: Sequence[int], total: Sequence[int], beside: Sequence[int] = ()) -> Words:
    """(2 M + n,) words of exact counts: right answers, samples of each class, n more counts."""
    return np.array([*correct, *total, *beside], dtype=np.uint64)


def encode_cells(cells: Integers) -> Words:
    """(2 M,) words of noised right and wrong answers of each class, in grid steps."""
    return cells.view(np.uint64)


def decode_counts(
    words: Words, classes: int, *, noised: bool, beside: int = 0
) -> tuple[list[int], list[int], list[int]]:
    """(right answers, samples, other counts) from a sum of count_words(), the first two by class.

    noised: of cell_words() instead, without other counts. beside: number of other counts. Raises ValueError
    when words are no such sum.
    """
    if len(words) != 2 * classes + beside:
        raise ValueError(f"words: found {len(words)}, expected {2 * classes + beside}")
    if noised:
        return *round_to_samples(words.view(np.int64)), []
    numbers = [int(word) for word in words]
    correct, total, others = numbers[:classes], numbers[classes : 2 * classes], numbers[2 * classes :]
    if any(a > b for a, b in zip(correct, total, strict=True)) or max(total + others) >= 2**62:
        raise ValueError("counts: they are no sum of right answers and samples of each class")
    return correct, total, others
