"""Which tensors of a model are parameters, and which are running statistics of its normalisation layers."""

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


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """tensors under `prefix/name`, as state_dict() and a request's method field keep them."""
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def unprefixed(prefix: str, values: Mapping[str, object]) -> dict[str, Tensor]:
    """The tensors that prefixed() put among values."""
    start = f"{prefix}/"
    return {
        name.removeprefix(start): value
        for name, value in values.items()
        if name.startswith(start) and isinstance(value, Tensor)
    }
