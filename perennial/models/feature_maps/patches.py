"""Features of patches that nobody trained: whitened patches as filters, averaged over a coarse grid.

Coates and Ng 2011; Thiry et al. 2021 (arXiv 2101.07528). A patch is centred and divided by its deviation,
whitened, and multiplied with unit filters; what exceeds a threshold on either side is averaged over each cell
of the grid. Centring and whitening are folded into the filters, and deviations come from box filters, so that
all of it is one convolution.

Filters are patches of two photographs, a temple and a flower, that come inside scikit-learn (CC BY 2.0;
danielbuechele and vultilion on Flickr). On HAM10000 they do as well as patches of CIFAR-100's images, and
better than patches of noise or of drawn discs. A map may see an image's symmetric images.

Shapes: K filters, p side of a patch, g cells along each side; features (B, 2 K g^2).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perennial.foundation.errors import ConfigError
from perennial.foundation.streams import stream
from perennial.models.feature_maps.config import Symmetry

SHA256 = "99310b92a8963a4b9118f3a93695bf9d2f7c20a03361f1962972901ccd5560da"
"""Of the decoded pixels: another decoder of JPEG would give other filters."""
_LUMA = (0.299, 0.587, 0.114)


@lru_cache(maxsize=2)
def load_photographs(channels: int) -> tuple[np.ndarray, ...]:
    """scikit-learn's photographs, each (channels, H, W) float64 in 0..255; 1 channel is brightness.

    Raises ConfigError on another number of channels, or if they are decoded to other
    pixels than everywhere else.
    """
    from sklearn.datasets import load_sample_images

    images = load_sample_images().images
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(image).tobytes() for image in images)).hexdigest()
    if digest != SHA256:
        raise ConfigError(
            f"model.features: patches: scikit-learn's photographs have SHA-256 {digest:.12} here, and "
            f"{SHA256:.12} elsewhere; sites with another decoder of JPEG would have other filters"
        )
    if channels == 3:
        return tuple(image.transpose(2, 0, 1).astype(np.float64) for image in images)
    if channels == 1:
        return tuple((image @ np.array(_LUMA))[None] for image in images)
    raise ConfigError(f"model.features: patches: found images of {channels} channels; allowed 1 or 3")


THRESHOLD = 0.5
"""What a response must exceed to count."""
SMOOTHING = 10.0
"""Added to a patch's variance, in 0..255 units: flat patches stay small."""
WHITENING = 0.1
"""Added to the eigenvalues of the patches' covariance."""
SAMPLED = 50_000
"""Patches whose covariance whitens."""
TOGETHER = 100
"""Filters that are applied at once, which bounds the memory."""
IMAGES = 8
"""Images that a processor takes at once: their responses stay in its cache, which takes half the time of one
pass over 64. The bits are the same."""
MIDDLE = 128.0


@dataclass(frozen=True)
class Filters:
    """Convolution filters made of whitened image patches.

    weight: (K, C, p, p) float32, of centred patches divided by their deviation.
    offset: (K,).
    """

    weight: Tensor
    offset: Tensor


@lru_cache(maxsize=4)
def draw_filters(count: int, size: int, channels: int) -> Filters:
    """Filters from patches of public photographs, drawn from a public seed.

    Raises ConfigError if there are no photographs of so many channels.
    """
    return build_filters(load_photographs(channels), count, size, seed=0)


def build_filters(images: Sequence[np.ndarray], count: int, size: int, seed: int) -> Filters:
    """Filters from patches of images, (C, H, W) in 0..255 each."""
    generator = stream(seed, "patches", size)
    channels = images[0].shape[0]
    picked = generator.integers(0, len(images), SAMPLED + count)
    corners = generator.random((SAMPLED + count, 2))
    patches = np.empty((SAMPLED + count, channels, size, size))
    for patch, which, (row, column) in zip(patches, picked, corners, strict=True):
        image = images[which]
        top = int(row * (image.shape[1] - size + 1))
        left = int(column * (image.shape[2] - size + 1))
        patch[:] = image[:, top : top + size, left : left + size]
    patches = patches.reshape(len(patches), -1)
    patches -= patches.mean(axis=1, keepdims=True)
    patches /= np.sqrt(patches.var(axis=1, keepdims=True) + SMOOTHING)
    mean = patches[:SAMPLED].mean(axis=0)
    centred = patches - mean
    values, vectors = np.linalg.eigh(centred[:SAMPLED].T @ centred[:SAMPLED] / SAMPLED)
    whiten = (vectors / np.sqrt(values.clip(0) + WHITENING)) @ vectors.T
    chosen = centred[SAMPLED:] @ whiten
    chosen /= np.linalg.norm(chosen, axis=1, keepdims=True)
    filters = chosen @ whiten
    offset = filters @ mean
    filters -= filters.mean(axis=1, keepdims=True)
    weight = torch.from_numpy(filters.reshape(count, channels, size, size)).float()
    return Filters(weight, torch.from_numpy(offset).float())


class Patches(nn.Module):
    """(B, C, H, W) pixels in 0..255 -> (B, 2 K g^2) features, never negative."""

    def __init__(
        self,
        filters: Filters,
        grid: int,
        sides: tuple[int, int] | None = None,
        power: float = 1.0,
    ) -> None:
        """sides: (H, W) to average images down to; None keeps theirs. power: that features are raised to."""
        super().__init__()
        self.sides = sides
        self.weight = nn.Parameter(filters.weight, requires_grad=False)
        self.offset = nn.Parameter(filters.offset, requires_grad=False)
        self.grid, self.power = grid, power
        self.width = 2 * len(filters.weight) * grid * grid
        raised = "" if power == 1 else f" to the power {power}"
        self.about = f"patches {grid} {THRESHOLD} {sides}{raised}"

    def forward(self, pixels: Tensor) -> Tensor:
        # an exported network has one graph for any number of images
        if pixels.device.type != "cpu" or torch.compiler.is_compiling():
            return self._compute_features(pixels)
        return torch.cat([self._compute_features(images) for images in pixels.split(IMAGES)])

    def _compute_features(self, pixels: Tensor) -> Tensor:
        size = self.weight.shape[-1]
        if self.sides is not None:
            pixels = F.adaptive_avg_pool2d(pixels, self.sides)
        x = pixels - MIDDLE
        mean = F.avg_pool2d(x.mean(dim=1, keepdim=True), size, stride=1)
        square = F.avg_pool2d(x.square().mean(dim=1, keepdim=True), size, stride=1)
        scale = torch.rsqrt((square - mean.square()).clamp(min=0) + SMOOTHING)
        parts = []
        for weight, offset in zip(self.weight.split(TOGETHER), self.offset.split(TOGETHER), strict=True):
            response = F.conv2d(x, weight) * scale - offset[:, None, None]
            parts.append(self._averaged(F.relu(response - THRESHOLD)))
            parts.append(self._averaged(F.relu(-response - THRESHOLD)))
        features = torch.cat(parts, dim=1)
        return features if self.power == 1 else features.pow(self.power)

    def _averaged(self, maps: Tensor) -> Tensor:
        """(B, K, H, W) -> (B, K g^2): the mean over each cell."""
        rows, columns = (_compute_edges(side, self.grid) for side in maps.shape[2:])
        cells = [
            maps[:, :, top:bottom, left:right].mean(dim=(2, 3))
            for top, bottom in rows
            for left, right in columns
        ]
        return torch.cat(cells, dim=1)


def _compute_edges(side: int, parts: int) -> list[tuple[int, int]]:
    """Where each of so many cells begins and ends; they overlap by one where the side cannot be divided."""
    return [(part * side // parts, -(-(part + 1) * side // parts)) for part in range(parts)]


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
        return torch.stack([self.map(image) for image in self._mirror_images(pixels)]).mean(dim=0)

    def _mirror_images(self, pixels: Tensor) -> Sequence[Tensor]:
        mirrored = [pixels.flip(sides) if sides else pixels for sides in MIRRORS[self.symmetry]]
        if self.symmetry != "square":
            return mirrored
        return mirrored + [image.transpose(-1, -2).contiguous() for image in mirrored]
