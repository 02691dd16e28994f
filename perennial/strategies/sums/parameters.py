"""Tells a model's parameters from the running statistics of its normalisation layers."""

from collections.abc import Mapping

import torch
from torch import Tensor

STATISTICS = ("running_mean", "running_var")


def is_statistic(name: str) -> bool:
    """Whether a tensor is a running mean or variance.

    Statistics are averaged, and never extrapolated or corrected, because a variance below
    zero is no variance.
    """
    return name.rsplit(".", 1)[-1] in STATISTICS


def parameter_zeros(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zeros in the shapes of the parameters among arrays."""
    return {name: torch.zeros_like(tensor) for name, tensor in arrays.items() if not is_statistic(name)}
