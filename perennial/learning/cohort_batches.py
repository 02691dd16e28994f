"""The batches of several sites, one of each at a time, in the order in which each site alone would take them.

K: sites, the one with most steps first. B: samples of a step's largest batch. N: samples of all sites.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import torch
from torch import Tensor

from perennial.config.learner import LearnerConfig
from perennial.data.config import AugmentationConfig
from perennial.foundation.devices import to_device
from perennial.learning.batches import CONVERTED_VALUES, TrainingSet, epoch_order, shuffled
from perennial.models.stacked import side_by_side


@dataclass(frozen=True)
class CohortBatch:
    """One training step of the first `count` sites.

    rows: (B, count) int64, which of the N samples; a shorter batch is filled up with its first sample.
    sizes: samples of each site's batch. inputs: (B, count * C, ...). labels: (B * count,) int64.
    """

    rows: Tensor
    sizes: tuple[int, ...]
    inputs: Tensor
    labels: Tensor


class CohortBatches:
    """All steps of a round. sizes: (steps, K) samples of each batch, 0 after a site's last one."""

    def __init__(
        self,
        config: LearnerConfig,
        data: Sequence[TrainingSet],
        generators: Sequence[np.random.Generator],
        augmentation: AugmentationConfig,
        memory_format: torch.memory_format,
    ) -> None:
        """Draw the order of each site's samples with its generator. memory_format: of images."""
        self._config, self._data, self._format = config, data, memory_format
        self._balanced = config.memory is not None and config.memory.balanced
        self._offsets = np.cumsum([0, *map(len, data)])[:-1].tolist()
        self._labels = torch.cat([each.y for each in data])
        self.sizes = self._all_sizes()
        self._augmented: list[Iterator[tuple[Tensor, Tensor, Tensor]]] | None = None
        if augmentation.active:
            pairs = zip(data, generators, strict=True)
            self._augmented = [self._augmented_batches(each, draw, augmentation) for each, draw in pairs]
            return
        self._rows = to_device(torch.from_numpy(self._all_rows(generators)), self._labels.device)
        self._stored = torch.cat([each.x for each in data])
        few = self._stored.numel() <= CONVERTED_VALUES
        self._floats = data[0].floats(self._stored) if few else None

    def step(self, number: int, count: int) -> CohortBatch:
        """Step `number` of the first `count` sites. With augmentation, ask for each once, in order."""
        sizes = tuple(self.sizes[number, :count].tolist())
        if self._augmented is None:
            rows = self._rows[number, : max(sizes), :count].contiguous()
            if self._floats is None:
                inputs = self._data[0].floats(self._stored[rows.view(-1)])
            else:
                inputs = self._floats[rows.view(-1)]
            inputs = inputs.reshape(len(rows), -1, *inputs.shape[2:])
        else:
            drawn = [next(site) for site in self._augmented[:count]]
            rows = self._filled([places for places, _, _ in drawn])
            inputs = side_by_side([each for _, each, _ in drawn])
        if inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=self._format)
        return CohortBatch(rows, sizes, inputs, self._labels[rows].view(-1))

    def reported(self) -> Tensor:
        """(steps, K): samples of each batch of the last epoch, whose loss is reported; 0 for others."""
        table = np.zeros(self.sizes.shape, dtype=np.float32)
        for site, steps in enumerate(np.count_nonzero(self.sizes, axis=0)):
            last = slice(steps - steps // self._config.epochs, steps)
            table[last, site] = self.sizes[last, site]
        return to_device(torch.from_numpy(table), self._labels.device)

    def _all_sizes(self) -> np.ndarray:
        size, epochs = self._config.batch_size, self._config.epochs
        columns = []
        for each in self._data:
            one = np.full(ceil(len(each) / size), size)
            one[-1] = len(each) - size * (len(one) - 1)
            columns.append(np.tile(one, epochs))
        sizes = np.zeros((max(map(len, columns)), len(columns)), dtype=np.int64)
        for site, column in enumerate(columns):
            sizes[: len(column), site] = column
        return sizes

    def _all_rows(self, generators: Sequence[np.random.Generator]) -> np.ndarray:
        """(steps, B, K)."""
        epochs, longest = self._config.epochs, int(self.sizes.max())
        rows = np.zeros((len(self.sizes), longest, len(self._data)), dtype=np.int64)
        for site, (each, generator) in enumerate(zip(self._data, generators, strict=True)):
            steps = ceil(len(each) / self._config.batch_size)
            size = min(self._config.batch_size, longest)
            orders = np.stack([epoch_order(each, generator, self._balanced) for _ in range(epochs)])
            table = np.empty((epochs, steps * size), dtype=np.int64)
            table[:, : len(each)] = orders
            table[:, len(each) :] = orders[:, (steps - 1) * size, None]
            rows[: epochs * steps, :size, site] = table.reshape(-1, size) + self._offsets[site]
        return rows

    def _augmented_batches(
        self, data: TrainingSet, generator: np.random.Generator, augmentation: AugmentationConfig
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for _ in range(self._config.epochs):
            size = self._config.batch_size
            yield from shuffled(data, size, generator, augmentation, balanced=self._balanced)

    def _filled(self, batches: Sequence[Tensor]) -> Tensor:
        """(B, K) indices among all samples."""
        longest = max(map(len, batches))
        moved = [
            torch.cat([places, places[:1].expand(longest - len(places))]) + offset
            for places, offset in zip(batches, self._offsets, strict=False)
        ]
        return torch.stack(moved, dim=1)
