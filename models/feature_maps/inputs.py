"""The inputs themselves as a map."""

from math import prod

from torch import Tensor, nn

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
