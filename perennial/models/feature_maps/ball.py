"""Features of length 1/sqrt(2) on a grid, so that sums of their products are exact in double precision."""

import hashlib
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from perennial.foundation.errors import DataError

GRID = 1 << 16
"""Steps in 1: every feature is a multiple of 1 / GRID."""
CONSTANT_STEPS = math.isqrt(GRID * GRID // 2)
"""1/sqrt(2), rounded towards zero: the constant that is appended for the bias."""
CONSTANT = CONSTANT_STEPS / GRID
RADIUS_SQUARED = 0.5
RADIUS = math.sqrt(RADIUS_SQUARED)


def unit_rows(features: Tensor) -> Tensor:
    """(B, d) rows of length 1; a row of zeros stays."""
    length = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    return features / torch.where(length > 0, length, torch.ones_like(length))


def on_grid(features: Tensor) -> Tensor:
    """(B, d) float32 rows of length 1/sqrt(2), each value rounded towards zero to a multiple of 2^-16.

    Rounding to nearest could push the length above 1/sqrt(2). A row of zeros stays.
    """
    return torch.trunc(unit_rows(features.float()) * (RADIUS * GRID)) / GRID


def within_radius(features: Tensor) -> Tensor:
    """(n, d) rows on the grid, none longer than 1/sqrt(2), not even by what rounding left of on_grid's.

    Every value of a row that is longer loses at least one part in 2^14. features: (n, d) float64 as on_grid
    gives them; float64 adds the squares of such rows without rounding. Raises DataError on longer ones.
    """
    longer = features.square().sum(dim=1) > RADIUS_SQUARED
    if not longer.any():
        return features
    features = features.clone()
    features[longer] = torch.trunc(features[longer] * ((1 - 2.0**-14) * GRID)) / GRID
    if bool((features.square().sum(dim=1) > RADIUS_SQUARED).any()):
        raise DataError("features: found a sample of length above 1/sqrt(2); allowed on_grid's")
    return features


def content_of(parts: Iterable[tuple[str, Mapping[str, Tensor]]]) -> str:
    """SHA-256 over parts in order, each (a text of what tensors do not say, tensors by name)."""
    digest = hashlib.sha256()
    for about, tensors in parts:
        digest.update(f"{about};".encode())
        for name in sorted(tensors):
            tensor = tensors[name].detach().cpu().contiguous()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(tensor.numpy().data)
    return digest.hexdigest()
