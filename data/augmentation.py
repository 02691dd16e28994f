"""Random crops and flips of whole batches, and the step from stored samples to what a model sees.

x_BCHW: a batch of images, 8-bit or float, on any device.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from perennial.data.config import AugmentationConfig


def to_float(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """float32 (B, C, H, W) or (B, D): (x - mean) / std, 8-bit values scaled to 0..1 before; x stays.

    mean, std: (C,) or (D,), on any device.
    """
    shape = (-1, *[1] * (x.ndim - 2))
    mean, std = mean.to(x.device).view(shape), std.to(x.device).view(shape)
    if x.dtype == torch.uint8:
        return x.float().mul_(1 / (255 * std)).sub_(mean / std)
    return (x - mean).div_(std)


def augment(
    x_BCHW: Tensor, config: AugmentationConfig, generator: np.random.Generator | torch.Generator
) -> Tensor:
    """Each image moved by up to crop_padding pixels both ways and mirrored or not; what comes in is 0.

    A NumPy generator gives the same choices on every device; a torch generator must be of x's device.
    He et al. 2016 (arXiv 1512.03385), section 4.2.
    """
    batch, channels, height, width = x_BCHW.shape
    p = config.crop_padding
    row_shift, column_shift, mirrored = _draw(batch, 2 * p + 1, generator, x_BCHW.device)
    rows = row_shift[:, None] + torch.arange(height, device=x_BCHW.device)
    columns = column_shift[:, None] + torch.arange(width, device=x_BCHW.device)
    if config.flip:
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    padded = F.pad(x_BCHW, (p, p, p, p)) if p else x_BCHW
    # One gather over flattened images: seven times as fast as indexing by four tensors.
    indices = (rows[:, :, None] * (width + 2 * p) + columns[:, None, :]).view(batch, 1, height * width)
    return padded.flatten(2).gather(2, indices.expand(-1, channels, -1)).view_as(x_BCHW)


def _draw(
    batch: int, shifts: int, generator: np.random.Generator | torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """(row shift, column shift, mirrored), each (batch,)."""
    if isinstance(generator, torch.Generator):
        shift = torch.randint(shifts, (2, batch), generator=generator, device=device)
        coin = torch.randint(2, (batch,), generator=generator, device=device)
    else:
        shift = torch.from_numpy(generator.integers(0, shifts, (2, batch))).to(device)
        coin = torch.from_numpy(generator.integers(0, 2, batch)).to(device)
    return shift[0], shift[1], coin == 1
