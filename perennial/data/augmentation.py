"""Random crops and flips of whole batches, and the step from stored samples to what a model sees.

x_BCHW: a batch of images, 8-bit or float, on any device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from perennial.data.config import AugmentationConfig
from perennial.foundation.devices import to_device


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
    return moved(x_BCHW, config, draw_moves([len(x_BCHW)], config, generator, x_BCHW.device))


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


def moved(x_BCHW: Tensor, config: AugmentationConfig, moves: AugmentationDraw) -> Tensor:
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
