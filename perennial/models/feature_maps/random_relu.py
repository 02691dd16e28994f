"""ReLU of a random projection, drawn from a public seed: as a map of inputs, and behind other maps."""

from math import prod, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perennial.foundation.streams import stream

OFFSET = 0.5
"""Standard deviation of what is added before the ReLU, where projections have deviation 1."""


class RandomReLU(nn.Module):
    """(B, ...) -> (B, width): relu(W x + b), never trained.

    W: normal with deviation 1 / sqrt(inputs) for inputs of deviation 1, or 1 for inputs of length 1.
    """

    about = "random ReLU"

    def __init__(self, width: int, input_shape: tuple[int, ...], seed: int, *, unit_length: bool) -> None:
        super().__init__()
        inputs = prod(input_shape)
        generator = stream(seed, "random-map", width, inputs)
        scale = 1.0 if unit_length else 1 / sqrt(inputs)
        weight = torch.from_numpy(generator.standard_normal((width, inputs))) * scale
        offset = torch.from_numpy(generator.standard_normal(width)) * (0.0 if unit_length else OFFSET)
        self.weight = nn.Parameter(weight.float(), requires_grad=False)
        self.offset = nn.Parameter(offset.float(), requires_grad=False)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.linear(x.flatten(1), self.weight, self.offset))
