"""What attacks on images share: what counts as recovered, and the model whose neurons sort by brightness."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.attacked_hospital import PIXELS

ALIKE = 0.98
"""Correlation from which a reconstruction counts as the image."""


@dataclass(frozen=True)
class Outcome:
    """What an attack came to. refusal: the first, '' without one."""

    recovered: int
    of: int
    refusal: str


def matched(found: Tensor, images: Tensor) -> int:
    """How many of the images (n, 64) some row of found (k, 64) shows."""
    if len(found) == 0:
        return 0
    rows = [_standard(tensor.double()) for tensor in (images, found)]
    return int(((rows[0] @ rows[1].T / PIXELS).max(dim=1).values > ALIKE).sum())


def _standard(rows: Tensor) -> Tensor:
    spread = rows.std(dim=1, correction=0, keepdim=True)
    return torch.where(spread > 0, (rows - rows.mean(dim=1, keepdim=True)) / spread, 0.0)


def first_layer(arrays: Mapping[str, Tensor]) -> tuple[str, str]:
    """Names of the first layer's weight and bias."""
    weight = next(name for name, tensor in arrays.items() if tensor.shape == (PIXELS, PIXELS))
    return weight, weight.removesuffix("weight") + "bias"


def head(arrays: Mapping[str, Tensor]) -> tuple[str, str]:
    weight = [name for name, tensor in arrays.items() if tensor.dim() == 2][-1]
    return weight, weight.removesuffix("weight") + "bias"


def imprinted(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model whose neurons sort images by brightness; neighbours differ by one image.

    Fowl et al. 2022 (arXiv 2110.13057).
    """
    weight, bias = first_layer(arrays)
    last, last_bias = head(arrays)
    arrays[weight] = torch.full((PIXELS, PIXELS), 1 / PIXELS)
    arrays[bias] = -torch.linspace(-0.4, 0.4, PIXELS)
    arrays[last] = torch.linspace(-1, 1, len(arrays[last]))[:, None].expand(-1, PIXELS).clone() / PIXELS
    arrays[last_bias] = torch.zeros_like(arrays[last_bias])
    return arrays


def read_imprint(update: Mapping[str, Tensor]) -> Tensor:
    """(k, 64) what lies between neighbouring neurons of an update of imprinted()."""
    weight, bias = first_layer(update)
    rows = update[weight].double().diff(dim=0)
    scale = update[bias].double().diff()[:, None]
    return rows[scale.flatten().abs() > 1e-12]
