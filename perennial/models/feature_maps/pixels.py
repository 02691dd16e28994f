"""Features of the stored values themselves: as they are, their products, or random projections of them."""

from math import prod, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perennial.foundation.streams import stream

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


FURTHEST = 4.0
"""Deviations from the mean beyond which a value counts as so many, in products and where length is kept."""
APART = 3.0


class Pairs(nn.Module):
    """(B, D) normalised rows -> (B, D (D + 3) / 2 + 1): values, products of each two, and a constant.

    The constant is large enough that a row of length 1 keeps how large its values are.
    """

    about = "pairs"
    first: Tensor
    second: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        """shape: (D,) of one row."""
        super().__init__()
        first, second = torch.triu_indices(shape[0], shape[0])
        self.register_buffer("first", first, persistent=False)
        self.register_buffer("second", second, persistent=False)
        self.width = shape[0] + len(first) + 1

    def forward(self, x: Tensor) -> Tensor:
        values = x.clamp(-FURTHEST, FURTHEST)
        constant = values.new_full((x.shape[0], 1), APART * len(self.first) ** 0.5)
        return torch.cat([values, values[:, self.first] * values[:, self.second], constant], dim=1)


LARGEST = 255.0
MIDDLE = 0.5


class Inputs(nn.Module):
    """(B, C, H, W) pixels in 0..255 -> (B, C H W) in -1/2..1/2; (B, D) normalised numbers as they are.

    keep_length: of rows: numbers between -4 and 4, and one value more, by which all rows have one length.
    """

    def __init__(self, shape: tuple[int, ...], keep_length: bool = False) -> None:
        """shape: of one sample."""
        super().__init__()
        self.keep_length, self.about = keep_length, "inputs, length kept" if keep_length else "inputs"
        self.width = prod(shape) + keep_length

    def forward(self, x: Tensor) -> Tensor:
        if self.keep_length:
            values = x.clamp(-FURTHEST, FURTHEST)
            rest = values.shape[1] * FURTHEST**2 - values.square().sum(dim=1, keepdim=True)
            return torch.cat([values, rest.clamp(min=0).sqrt()], dim=1)
        return x if x.ndim == 2 else x.flatten(1) / LARGEST - MIDDLE


OFFSET = 0.5
"""Standard deviation of what is added before the ReLU, where projections have deviation 1."""


class RandomReLU(nn.Module):
    """(B, ...) -> (B, width): relu(W x + b), never trained.

    W: normal with deviation 1 / sqrt(inputs), for inputs of deviation 1.
    """

    about = "random ReLU"

    def __init__(self, width: int, input_shape: tuple[int, ...], seed: int = 0) -> None:
        super().__init__()
        inputs = prod(input_shape)
        generator = stream(seed, "random-map", width, inputs)
        weight = torch.from_numpy(generator.standard_normal((width, inputs))) * (1 / sqrt(inputs))
        offset = torch.from_numpy(generator.standard_normal(width)) * OFFSET
        self.weight = nn.Parameter(weight.float(), requires_grad=False)
        self.offset = nn.Parameter(offset.float(), requires_grad=False)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.linear(x.flatten(1), self.weight, self.offset))
