"""What one site trains on in one round, and in which batches."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from perennial.data.config import AugmentationConfig
from perennial.foundation.devices import to_device
from perennial.privacy.sample_level import split_blocks


def to_float(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """float32 (B, C, H, W) or (B, D): (x - mean) / std, 8-bit values scaled to 0..1 before; x stays.

    mean, std: (C,) or (D,), on any device.
    """
    shape = (-1, *[1] * (x.ndim - 2))
    mean, std = mean.to(x.device).view(shape), std.to(x.device).view(shape)
    if x.dtype == torch.uint8:
        return x.float().mul_(1 / (255 * std)).sub_(mean / std)
    return (x - mean).div_(std)


@dataclass(frozen=True)
class AugmentationDraw:
    """Random moves of n images: rows, columns (n,) int64 in 0 .. 2 * crop_padding; mirrored (n,) bool."""

    rows: Tensor
    columns: Tensor
    mirrored: Tensor


def augment(
    x_BCHW: Tensor, config: AugmentationConfig, generator: np.random.Generator | torch.Generator
) -> Tensor:
    """Shift each image by up to crop_padding pixels each way, filled with 0, and mirror it or not.

    A NumPy generator gives the same choices on every device; a torch generator must be of x's device.
    He et al. 2016 (arXiv 1512.03385), section 4.2.
    """
    return shift_and_flip(x_BCHW, config, draw_moves([len(x_BCHW)], config, generator, x_BCHW.device))


def draw_moves(
    sizes: Sequence[int],
    config: AugmentationConfig,
    generator: np.random.Generator | torch.Generator,
    device: torch.device,
) -> AugmentationDraw:
    """Draw the moves for batches of these sizes, one batch after the other, and put them on the device."""
    shifts = 2 * config.crop_padding + 1
    if isinstance(generator, torch.Generator):
        n = sum(sizes)
        shift = torch.randint(shifts, (2, n), generator=generator, device=device)
        coin = torch.randint(2, (n,), generator=generator, device=device)
        return AugmentationDraw(shift[0], shift[1], coin == 1)
    drawn = [(generator.integers(0, shifts, (2, n)), generator.integers(0, 2, n)) for n in sizes]
    table = np.concatenate([np.vstack(pair) for pair in drawn], axis=1)
    rows, columns, coin = to_device(torch.from_numpy(table), device)
    return AugmentationDraw(rows, columns, coin == 1)


def shift_and_flip(x_BCHW: Tensor, config: AugmentationConfig, moves: AugmentationDraw) -> Tensor:
    """The images shifted and flipped as `moves` says, in the shape of x_BCHW."""
    batch, channels, height, width = x_BCHW.shape
    p = config.crop_padding
    rows = moves.rows[:, None] + torch.arange(height, device=x_BCHW.device)
    columns = moves.columns[:, None] + torch.arange(width, device=x_BCHW.device)
    if config.flip:
        columns = torch.where(moves.mirrored[:, None], columns.flip(1), columns)
    padded = F.pad(x_BCHW, (p, p, p, p)) if p else x_BCHW
    # One gather over flattened images: seven times as fast as indexing by four tensors.
    indices = (rows[:, :, None] * (width + 2 * p) + columns[:, None, :]).view(batch, 1, height * width)
    return padded.flatten(2).gather(2, indices.expand(-1, channels, -1)).view_as(x_BCHW)


CONVERTED_VALUES = 1 << 20
"""Values of stored samples that become floats in one operation (4 MiB of them)."""
CONVERTED_ON_GPU = 1 << 26
"""The same on a GPU, which has more memory and dearer calls (256 MiB)."""
EVALUATION_BATCH = 2048


@dataclass(frozen=True)
class TrainingSet:
    """Samples of one round: new data first, then exemplars.

    x: (n, C, H, W) uint8 or (n, D) float32 on the device. y: (n,) int64 labels. mean, std: to normalise with.
    exemplars: how many of the n are exemplars. patients: (n,) int64, each sample's patient counted from 0, if
    patients are the privacy unit. alone: a protection holds, so that no sample may change by one bit what a
    model answers for another.
    """

    x: Tensor
    y: Tensor
    mean: Tensor
    std: Tensor
    exemplars: int = 0
    channels_last: bool = False
    patients: Tensor | None = None
    alone: bool = False

    def __len__(self) -> int:
        return len(self.y)

    def counts(self, num_classes: int) -> Tensor:
        """(num_classes,) number of samples of each class."""
        return torch.bincount(self.y, minlength=num_classes)

    @cached_property
    def shares(self) -> np.ndarray:
        """(n,) float64, the probability of drawing each sample if every class is drawn equally often."""
        labels = self.y.cpu()
        frequency = torch.bincount(labels)[labels].double().reciprocal().numpy()
        return frequency / frequency.sum()

    @cached_property
    def places(self) -> Tensor:
        """(n,) int64 on the CPU, each sample's number by its content alone, for split_blocks()."""
        return torch.tensor(
            [int.from_bytes(key[:4], "big") for key in hash_contents(self.x)], dtype=torch.int64
        )

    def inputs(self, rows: Tensor | slice) -> Tensor:
        """The samples at `rows` as the model's inputs: normalised float32 on the device."""
        return self.floats(self.x[rows])

    def floats(self, x: Tensor) -> Tensor:
        """Convert stored samples, as in x, to the model's inputs: normalised float32 on the device."""
        inputs = to_float(x, self.mean, self.std)
        return inputs.contiguous(memory_format=torch.channels_last) if self.channels_last else inputs


def draw_epoch_order(data: TrainingSet, generator: np.random.Generator, balanced: bool) -> np.ndarray:
    """(n,) int64 indices of the samples of one epoch, in order. balanced: draw each class equally often."""
    if not balanced:
        return generator.permutation(len(data))
    return generator.choice(len(data), size=len(data), p=data.shares)


def shuffle_batches(
    data: TrainingSet,
    batch_size: int,
    generator: np.random.Generator,
    augmentation: AugmentationConfig,
    *,
    balanced: bool = False,
    drop_single: bool = False,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(rows, inputs, labels) of one epoch in random order.

    balanced: draw each class equally often, as many samples in all as the set holds.
    drop_single: leave out a last batch of one sample, which batch normalisation cannot take.
    """
    device = data.y.device
    rows = to_device(torch.from_numpy(draw_epoch_order(data, generator, balanced)), device)
    if drop_single and len(data) > 1 and len(data) % batch_size == 1:
        rows = rows[:-1]
    # converted many batches at a time: small batches otherwise cost more in calls than in arithmetic
    values = CONVERTED_VALUES if device.type == "cpu" else CONVERTED_ON_GPU
    together = batch_size * max(1, values // (batch_size * data.x[0].numel()))
    for part in rows.split(together):
        stored, labels, batches = data.x[part], data.y[part], part.split(batch_size)
        if augmentation.active:
            # as stored: half the bytes to move, and what a crop adds is black, not the mean colour
            moves = draw_moves([len(batch) for batch in batches], augmentation, generator, device)
            stored = shift_and_flip(stored, augmentation, moves)
        yield from zip(batches, data.floats(stored).split(batch_size), labels.split(batch_size), strict=True)


def split_batches(
    data: TrainingSet, among: Tensor | None = None
) -> Iterator[tuple[Tensor, slice | Tensor, slice | Tensor]]:
    """Yield batches for a model that only answers: (inputs, samples that they are of, inputs that count).

    among: (m,) int64, the samples to evaluate; None: all. The samples are counted in `among`. Where data are
    `alone`, samples come in blocks of one shape, and each has its place in a block by its own content.
    """
    if data.alone:
        rows = torch.arange(len(data)) if among is None else among.cpu()
        for block in split_blocks(data.places[rows]):
            there = (block >= 0).nonzero()[:, 0]
            inputs = data.inputs(to_device(rows[block.clamp(min=0)], data.y.device))
            yield inputs, block[there], to_device(there, data.y.device)
        return
    for start in range(0, len(data) if among is None else len(among), EVALUATION_BATCH):
        batch = slice(start, start + EVALUATION_BATCH)
        yield data.inputs(batch if among is None else among[batch]), batch, slice(None)


@torch.no_grad()
def compute_outputs(
    answer: Callable[[Tensor], Tensor], data: TrainingSet, among: Tensor | None = None
) -> Tensor:
    """(n, ...) values of `answer`, a function of inputs (B, ...), for all samples, without gradient.

    among: (m,) int64, samples that stand for all.
    """
    found, order = [], []
    for inputs, samples, counting in split_batches(data, among):
        found.append(answer(inputs)[counting])
        order.append(samples)
    if not found:
        return answer(data.inputs(slice(0)))
    values = torch.cat(found)
    return values[to_device(torch.argsort(torch.cat(order)), values.device)] if data.alone else values


def hash_contents(samples: Tensor) -> list[bytes]:
    """16 bytes of each sample (n, ...), a hash of its content."""
    # all rows of one buffer: nothing is copied for a hash
    rows = samples.cpu().contiguous().numpy().reshape(-1).view(np.uint8).data
    size = rows.nbytes // max(1, len(samples))
    return [
        hashlib.blake2b(rows[start : start + size], digest_size=16).digest()
        for start in range(0, rows.nbytes, size or 1)
    ]
