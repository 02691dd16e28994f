"""Features that do not change when an image is mirrored or turned: averages over its symmetric images.

What tells a lesion or an animal is mostly the same in the mirror. Averages are as many numbers as the
features of one image, so that messages stay as long and a sample's length within its bound.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from perennial.models.feature_maps.config import Symmetry

MIRRORS: dict[Symmetry, tuple[tuple[int, ...], ...]] = {
    "mirror": ((), (-1,)),
    "rectangle": ((), (-1,), (-2,), (-2, -1)),
    "square": ((), (-1,), (-2,), (-2, -1)),
}
"""Sides along which each of an image's images is mirrored; a square's are those and their transposes."""


class Symmetric(nn.Module):
    """(B, C, H, W) pixels -> (B, width): the mean of a map's features over each image's symmetric images."""

    def __init__(self, map_: nn.Module, symmetry: Symmetry) -> None:
        super().__init__()
        self.map = map_
        self.symmetry: Symmetry = symmetry
        self.width = int(map_.width)  # pyright: ignore[reportArgumentType]
        self.about = f"{symmetry} {map_.about}"

    def forward(self, pixels: Tensor) -> Tensor:
        return torch.stack([self.map(image) for image in self._images(pixels)]).mean(dim=0)

    def _images(self, pixels: Tensor) -> Sequence[Tensor]:
        mirrored = [pixels.flip(sides) if sides else pixels for sides in MIRRORS[self.symmetry]]
        if self.symmetry != "square":
            return mirrored
        return mirrored + [image.transpose(-1, -2).contiguous() for image in mirrored]
