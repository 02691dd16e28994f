"""The loss terms of several sites in one batch: each site's sum of terms, on its own samples.

The batches come one of each site at a time, in the order in which each site alone would take them.
Row b * K + k of a batch is sample b of site k; a shorter batch is filled up with rows that count nothing.
Shapes: K sites, B samples of the largest batch, M classes, M_old of the teacher, d features.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import numpy as np
import torch
from torch import Tensor

from perennial.config.learner import LearnerConfig
from perennial.data.config import AugmentationConfig
from perennial.foundation.devices import to_device
from perennial.learning.batches import CONVERTED_VALUES, TrainingSet, draw_epoch_order, shuffle_batches
from perennial.learning.losses import Batch, Loss, build_classification, compute_contrastive
from perennial.learning.objective import (
    Extra,
    FrozenOutputs,
    Outputs,
    Term,
    compute_row_terms,
    compute_teacher_logits,
    count_class_samples,
)
from perennial.models.dual_backbone import DualBackboneModel
from perennial.models.incremental import IncrementalModel
from perennial.models.stacked import StackedParameters, as_rows, join_batches


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
        self.sizes = self._compute_sizes()
        self._augmented: list[Iterator[tuple[Tensor, Tensor, Tensor]]] | None = None
        if augmentation.active:
            pairs = zip(data, generators, strict=True)
            self._augmented = [self._augment_batches(each, draw, augmentation) for each, draw in pairs]
            return
        self._rows = to_device(torch.from_numpy(self._draw_rows(generators)), self._labels.device)
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
            inputs = join_batches([each for _, each, _ in drawn])
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

    def _compute_sizes(self) -> np.ndarray:
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

    def _draw_rows(self, generators: Sequence[np.random.Generator]) -> np.ndarray:
        """(steps, B, K)."""
        epochs, longest = self._config.epochs, int(self.sizes.max())
        rows = np.zeros((len(self.sizes), longest, len(self._data)), dtype=np.int64)
        for site, (each, generator) in enumerate(zip(self._data, generators, strict=True)):
            steps = ceil(len(each) / self._config.batch_size)
            size = min(self._config.batch_size, longest)
            orders = np.stack([draw_epoch_order(each, generator, self._balanced) for _ in range(epochs)])
            table = np.empty((epochs, steps * size), dtype=np.int64)
            table[:, : len(each)] = orders
            table[:, len(each) :] = orders[:, (steps - 1) * size, None]
            rows[: epochs * steps, :size, site] = table.reshape(-1, size) + self._offsets[site]
        return rows

    def _augment_batches(
        self, data: TrainingSet, generator: np.random.Generator, augmentation: AugmentationConfig
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for _ in range(self._config.epochs):
            size = self._config.batch_size
            yield from shuffle_batches(data, size, generator, augmentation, balanced=self._balanced)

    def _filled(self, batches: Sequence[Tensor]) -> Tensor:
        """(B, K) indices among all samples."""
        longest = max(map(len, batches))
        moved = [
            torch.cat([places, places[:1].expand(longest - len(places))]) + offset
            for places, offset in zip(batches, self._offsets, strict=False)
        ]
        return torch.stack(moved, dim=1)


class CohortObjective:
    """The losses of the first K sites, whose parameters `sites` holds at the moment.

    model: of one site, with its frozen parts. network: the stacked one. data, extras: of each site.
    """

    def __init__(
        self,
        config: LearnerConfig,
        model: IncrementalModel,
        network: IncrementalModel,
        sites: StackedParameters,
        data: Sequence[TrainingSet],
        teacher: IncrementalModel | None,
        augmented: bool,
        first_class: int,
        extras: Sequence[Extra | None],
    ) -> None:
        self._config, self._network, self._sites, self._teacher = config, network, sites, teacher
        self._first_class, self._extras = first_class, extras
        frozen = [FrozenOutputs(model, teacher, each, augmented) for each in data]
        self._old_features = _join([each.old_features for each in frozen])
        self._old_logits = _join([each.old_logits for each in frozen])
        self._losses: list[Loss] = []
        for each in data:
            loss = build_classification(config)
            loss.begin(count_class_samples(config, each, model.num_classes))
            self._losses.append(loss)
        self._dual = isinstance(model, DualBackboneModel) and model.old_backbone is not None
        self._device = data[0].y.device
        self._layout = lru_cache(maxsize=64)(self._build_layout)

    def __call__(self, drawn: CohortBatch) -> tuple[Tensor, Tensor]:
        """(K,) losses with their graph, and (K,) losses over the labels without."""
        layout = self._layout(drawn.sizes)
        self._sites.sizes = drawn.sizes
        features, old_logits, new_features = self._compute_answers(drawn)
        count = len(drawn.sizes)
        batch = Batch(
            as_rows(self._network.classify(features), count),
            drawn.labels,
            as_rows(features, count),
            old_logits,
            self._first_class,
            None if new_features is None else as_rows(new_features, count),
        )
        if layout.loss is not None:
            losses = layout.average_rows(Term(layout.loss(batch)))
        else:
            parts = layout.parts(batch)
            losses = torch.stack([loss.mean(part) for loss, part in zip(self._losses, parts, strict=False)])
        over_labels = losses.detach()
        for term in compute_row_terms(self._config, batch):
            losses = losses + layout.average_rows(term)
        if (contrast := self._config.contrastive) is not None:
            values = [
                compute_contrastive(part.features, part.labels, contrast.temperature, contrast.form)
                for part in layout.parts(batch)
            ]
            losses = losses + contrast.weight * torch.stack(values)
        return self._add_extras(losses), over_labels

    def _compute_answers(self, drawn: CohortBatch) -> Outputs:
        """(B, K * d) features, old and new ones, and (B * K, M_old) logits of the teacher; see Outputs."""
        network, inputs = self._network, drawn.inputs
        old = new = None
        if self._dual:
            assert isinstance(network, DualBackboneModel)
            if self._old_features is None:
                old = network.compute_old_features(inputs)
            else:
                old = self._old_features[drawn.rows].flatten(1)
            new = network.backbone(inputs)
            found = network.fuse(old, new)
        else:
            found = network.features(inputs)
        return Outputs(found, self._old_logits_of(drawn, old), new)

    def _old_logits_of(self, drawn: CohortBatch, old: Tensor | None) -> Tensor | None:
        """(B * K, M_old) logits of the teacher. old: (B, K * d) features of the old backbone."""
        count, inputs = len(drawn.sizes), drawn.inputs
        if self._teacher is None:
            return None
        if self._old_logits is not None:
            return self._old_logits[drawn.rows].flatten(0, 1)
        rows = inputs.reshape(-1, inputs.shape[1] // count, *inputs.shape[2:])
        old = None if old is None else as_rows(old, count)
        return compute_teacher_logits(self._teacher, rows, old)

    def _add_extras(self, losses: Tensor) -> Tensor:
        """The losses with the terms that have samples of their own, as many at every site."""
        extras = [extra for extra in self._extras[: len(losses)] if extra is not None]
        if not extras:
            return losses
        drawn = [extra.draw() for extra in extras]
        inputs, targets = (join_batches([each[part] for each in drawn]) for part in (0, 1))
        count = len(extras)
        self._sites.sizes = (len(inputs),) * count
        term = extras[0].term(as_rows(self._network(inputs), count), as_rows(targets, count))
        return losses + self._layout(tuple(self._sites.sizes)).average_rows(term)

    def _build_layout(self, sizes: tuple[int, ...]) -> "_Layout":
        owners = torch.arange(len(sizes), device=self._device).repeat(max(sizes))
        loss = type(self._losses[0]).of_rows(self._losses[: len(sizes)], owners)
        return _Layout(sizes, loss, self._device)


def _join(answers: Sequence[Tensor | None]) -> Tensor | None:
    """(N, ...) answers for the samples of all sites, or None where they are not known beforehand."""
    known = [each for each in answers if each is not None]
    return torch.cat(known) if known else None


class _Layout:
    """Where the samples of batches of some sizes lie. loss: for all rows together, or None."""

    def __init__(self, sizes: tuple[int, ...], loss: Loss | None, device: torch.device) -> None:
        self.sizes, self.loss = sizes, loss
        counts = to_device(torch.tensor(sizes), device)
        self._shares = (torch.arange(max(sizes), device=device)[:, None] < counts) / counts
        """(B, K): what each row counts in the mean of its site."""

    def average_rows(self, term: Term) -> Tensor:
        """(K,) means of the sites' own rows."""
        each = term.each().view(self._shares.shape)
        return (each * self._shares.to(each.dtype)).sum(dim=0)

    def parts(self, batch: Batch) -> list[Batch]:
        """The batch of each site."""
        count = len(self.sizes)

        def of(rows: Tensor, site: int) -> Tensor:
            return rows.view(-1, count, *rows.shape[1:])[: self.sizes[site], site]

        return [
            Batch(
                of(batch.logits, site),
                of(batch.labels, site),
                of(batch.features, site),
                None if batch.old_logits is None else of(batch.old_logits, site),
                batch.first_class,
                None if batch.new_features is None else of(batch.new_features, site),
            )
            for site in range(count)
        ]
