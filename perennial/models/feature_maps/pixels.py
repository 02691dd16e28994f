"""Restores stored values from a model's normalised inputs, which can also serve as features."""

from math import prod

import torch
from torch import Tensor, nn

Constants = tuple[Tensor, Tensor]
"""(mean, std) of the inputs, (C,) or (D,) each."""


class Pixels(nn.Module):
    """Undoes normalisation: images to whole pixels in 0..255, (B, C, H, W); tables to stored numbers.

    Rounding of pixels undoes what normalising lost, so that no feature depends on an experiment's constants.
    """

    about = "pixels"

    def __init__(self, input_shape: tuple[int, ...], constants: Constants | None) -> None:
        """constants: mean and std; None if a saved model will fill them in."""
        super().__init__()
        shape = (input_shape[0], *(1 for _ in input_shape[1:]))
        mean, std = constants or (torch.zeros(input_shape[0]), torch.ones(input_shape[0]))
        self.mean = nn.Parameter(mean.float().reshape(shape).clone(), requires_grad=False)
        self.std = nn.Parameter(std.float().reshape(shape).clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 2:
            return x * self.std + self.mean
        pixels = torch.round((x * self.std + self.mean) * 255.0)
        # the layout in which convolutions are fastest
        return pixels.contiguous(memory_format=torch.channels_last)


LARGEST = 255.0
MIDDLE = 0.5


class Inputs(nn.Module):
    """(B, C, H, W) pixels in 0..255 -> (B, C H W) in -1/2..1/2; (B, D) normalised numbers as they are."""

    about = "inputs"

    def __init__(self, shape: tuple[int, ...]) -> None:
        """shape: of one sample."""
        super().__init__()
        self.width = prod(shape)

    def forward(self, x: Tensor) -> Tensor:
        return x if x.ndim == 2 else x.flatten(1) / LARGEST - MIDDLE
