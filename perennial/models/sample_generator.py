"""A network that makes inputs of a given shape out of noise.

Shapes: noise (B, NOISE), output (B, *input_shape), each channel of mean 0 and variance 1 over a batch, as
normalised inputs are.
"""

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perennial.models.initialisation import seeded_initialisation

NOISE = 64
WIDTH = 32


class SampleGenerator(nn.Module):
    """Images: two convolutions, each after doubling the resolution; rows of a table: two linear layers."""

    def __init__(self, input_shape: tuple[int, ...], seed: int, number: int) -> None:
        """Initialise the weights from the stream of `seed` and `number`."""
        super().__init__()
        self.input_shape = input_shape
        self._image = len(input_shape) == 3
        with seeded_initialisation(seed, "sample-generator", number):
            if self._image:
                channels, height, width = input_shape
                self._sides = [
                    (-(-height // 4), -(-width // 4)),
                    (-(-height // 2), -(-width // 2)),
                    (height, width),
                ]
                self.start = nn.Linear(NOISE, WIDTH * prod(self._sides[0]))
                self.norm1, self.norm2 = nn.BatchNorm2d(WIDTH), nn.BatchNorm2d(WIDTH)
                self.conv1 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
                self.conv2 = nn.Conv2d(WIDTH, channels, 3, padding=1)
                self.last: nn.Module = nn.BatchNorm2d(channels, affine=False)
            else:
                self.start = nn.Linear(NOISE, 4 * WIDTH)
                self.norm1 = nn.BatchNorm1d(4 * WIDTH)
                self.end = nn.Linear(4 * WIDTH, prod(input_shape))
                self.last = nn.BatchNorm1d(prod(input_shape), affine=False)

    def forward(self, noise: Tensor) -> Tensor:
        x = self.start(noise)
        if not self._image:
            x = F.leaky_relu(self.norm1(x), 0.2)
            return self.last(self.end(x)).view(-1, *self.input_shape)
        x = self.norm1(x.view(-1, WIDTH, *self._sides[0]))
        x = self.conv1(F.interpolate(x, self._sides[1]))
        x = F.leaky_relu(self.norm2(x), 0.2)
        return self.last(self.conv2(F.interpolate(x, self._sides[2])))

    @torch.no_grad()
    def samples(self, noise: Tensor) -> Tensor:
        """Outputs without gradient; the module stays in training mode, so that batches are normalised."""
        return self(noise)
