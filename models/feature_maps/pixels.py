"""From a model's normalised input back to the pixels, or the numbers of a table, that were stored."""

import torch
from torch import Tensor, nn

Constants = tuple[Tensor, Tensor]
"""(mean, std) of the inputs, (C,) or (D,) each."""


class Pixels(nn.Module):
    """(B, C, H, W) of (x / 255 - mean) / std -> x, whole numbers in 0..255, and of tables -> their numbers.

    Rounding of pixels undoes what normalising lost, so that no feature depends on an experiment's constants.
    """

    about = "pixels"

    def __init__(self, input_shape: tuple[int, ...], constants: Constants | None) -> None:
        """constants: None where a saved model brings them."""
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
