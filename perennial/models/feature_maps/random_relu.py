"""ReLU of a random projection, drawn from a public seed."""

from math import prod, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perennial.foundation.streams import stream

OFFSET = 0.5
"""Standard deviation of what is added before the ReLU, where projections have deviation 1."""


class RandomReLU(nn.Module):
    """(B, ...) -> (B, width): relu(W x + b), never trained.

    W: normal with deviation 1 / sqrt(inputs), for inputs of deviation 1.
    """

    about = "random ReLU"

    def __init__(self, width: int, input_shape: tuple[int, ...], seed: int) -> None:
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
