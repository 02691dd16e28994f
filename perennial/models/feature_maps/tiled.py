"""Features of a large image: averages over its tiles, each of which a map sees at its own size."""

import torch
from torch import Tensor, nn

from perennial.foundation.errors import ConfigError
from perennial.foundation.tiling import grid_of, places


class Tiled(nn.Module):
    """(B, C, H, W) pixels -> (B, width): the mean of a map's features over an image's tiles.

    A tile that is black throughout has nothing on it and does not count, unless all of them are.
    """

    def __init__(self, map_: nn.Module, tiles: int) -> None:
        super().__init__()
        self.map, self.tiles = map_, tiles
        self.width = int(map_.width)  # pyright: ignore[reportArgumentType]
        self.about = f"{tiles} tiles of {map_.about}"

    def forward(self, pixels: Tensor) -> Tensor:
        rows, columns = grid_of(self.tiles)
        (height, tops), (width, lefts) = places(pixels.shape[2], rows), places(pixels.shape[3], columns)
        parts = [
            pixels[:, :, top : top + height, left : left + width].contiguous()
            for top in tops
            for left in lefts
        ]
        shown = torch.stack([part.flatten(1).amax(dim=1) > 0 for part in parts]).to(pixels.dtype)
        counted = shown + (shown.sum(dim=0) == 0).to(pixels.dtype)
        features = torch.stack([self.map(part) for part in parts])
        return (features * counted[..., None]).sum(dim=0) / counted.sum(dim=0)[:, None]


def tile_shape(shape: tuple[int, ...], tiles: int) -> tuple[int, ...]:
    """(C, h, w) of each tile of images (C, H, W). Raises ConfigError if they have too few pixels."""
    rows, columns = grid_of(tiles)
    if shape[1] < rows or shape[2] < columns:
        raise ConfigError(
            f"model.features: tiles: found {tiles}, {rows} x {columns} of images of {shape[1]}x{shape[2]} "
            "pixels; allowed fewer"
        )
    return shape[0], places(shape[1], rows)[0], places(shape[2], columns)[0]
