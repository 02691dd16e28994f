"""Features of length 1/sqrt(2) on a grid, so that sums of their products are exact in double precision."""

import math

import torch
from torch import Tensor

GRID = 1 << 16
"""Steps in 1: every feature is a multiple of 1 / GRID."""
CONSTANT_STEPS = math.isqrt(GRID * GRID // 2)
"""1/sqrt(2), rounded towards zero: the constant that is appended for the bias."""
CONSTANT = CONSTANT_STEPS / GRID
RADIUS = math.sqrt(0.5)


def unit_rows(features: Tensor) -> Tensor:
    """(B, d) rows of length 1; a row of zeros stays."""
    length = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    return features / torch.where(length > 0, length, torch.ones_like(length))


def on_grid(features: Tensor) -> Tensor:
    """(B, d) float32 rows of length 1/sqrt(2), each value rounded towards zero to a multiple of 2^-16.

    Rounding to nearest could push the length above 1/sqrt(2). A row of zeros stays.
    """
    return torch.trunc(unit_rows(features.float()) * (RADIUS * GRID)) / GRID
