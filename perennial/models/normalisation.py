"""The normalisation layers that an experiment can choose."""

from collections.abc import Callable
from math import gcd

from torch import nn

from perennial.models.config import Norm


def group_norm(channels: int) -> nn.GroupNorm:
    """Group normalisation of eight groups, or of the greatest common divisor of eight and channels.

    It holds no statistics of the data and sees one sample at a time, which suits sites with different
    classes and per-sample privacy.

    Wu and He 2018 (arXiv 1803.08494).
    """
    return nn.GroupNorm(gcd(8, channels), channels)


def optional_norm(
    norm: Norm, channels: int, batch_norm: Callable[[int], nn.Module] = nn.BatchNorm2d
) -> nn.Module | None:
    """The layer for (B, channels, ...), or None for "none". batch_norm: BatchNorm1d for vectors."""
    if norm == "group":
        return group_norm(channels)
    return batch_norm(channels) if norm == "batch" else None
