"""Principal components of public images behind fixed maps, whitened: nobody's records decide them.

Each map's features of length 1 are centred by their mean over crops of two public photographs, projected on
the crops' first components, divided by the root of each one's variance, and scaled to length 1 again. All of
it is computed in float64 and rounded to a coarse grid, so that other machines come to the same numbers.

Features have length 1/sqrt(2) on a grid, so that sums of their products are exact in double precision.

Shapes: d a map's features, D its components; features (B, number of maps x D).
"""

import copy
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn

from perennial.foundation.cache import find_cache_folder
from perennial.foundation.errors import ConfigError, DataError
from perennial.foundation.files import make_folder, replace_file
from perennial.foundation.streams import stream
from perennial.models.feature_maps.imported import parse_tensors
from perennial.models.feature_maps.patches import load_photographs

GRID = 1 << 16
"""Steps in 1: every feature is a multiple of 1 / GRID."""
CONSTANT_STEPS = math.isqrt(GRID * GRID // 2)
"""1/sqrt(2), rounded towards zero: the constant that is appended for the bias."""
CONSTANT = CONSTANT_STEPS / GRID
RADIUS_SQUARED = 0.5
RADIUS = math.sqrt(RADIUS_SQUARED)


def normalise_rows(features: Tensor) -> Tensor:
    """(B, d) rows of length 1; a row of zeros stays."""
    length = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    return features / torch.where(length > 0, length, torch.ones_like(length))


def round_to_grid(features: Tensor) -> Tensor:
    """(B, d) float32 rows of length 1/sqrt(2), each value rounded towards zero to a multiple of 2^-16.

    Rounding to nearest could push the length above 1/sqrt(2). A row of zeros stays.
    """
    return torch.trunc(normalise_rows(features.float()) * (RADIUS * GRID)) / GRID


def shrink_to_radius(features: Tensor) -> Tensor:
    """(n, d) rows on the grid, none longer than 1/sqrt(2), not even by what rounding left of on_grid's.

    Every value of a row that is longer loses at least one part in 2^14. features: (n, d) float64 as on_grid
    gives them; float64 adds the squares of such rows without rounding. Raises DataError on longer ones.
    """
    longer = features.square().sum(dim=1) > RADIUS_SQUARED
    if not longer.any():
        return features
    features = features.clone()
    features[longer] = torch.trunc(features[longer] * ((1 - 2.0**-14) * GRID)) / GRID
    if bool((features.square().sum(dim=1) > RADIUS_SQUARED).any()):
        raise DataError("features: found a sample of length above 1/sqrt(2); allowed on_grid's")
    return features


def hash_content(parts: Iterable[tuple[str, Mapping[str, Tensor]]]) -> str:
    """SHA-256 over parts in order, each (a text of what tensors do not say, tensors by name)."""
    digest = hashlib.sha256()
    for about, tensors in parts:
        digest.update(f"{about};".encode())
        for name in sorted(tensors):
            tensor = tensors[name].detach().cpu().contiguous()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(tensor.numpy().data)
    return digest.hexdigest()


RAISED = 0.1
"""Added to each component's variance, in mean variances of a feature."""
MAPS_GRID = 1 << 10
"""Steps in 1 of a whitened component, so coarse that another machine seldom rounds to another step."""
MEAN_GRID = 1 << 20
IMAGES, SEED = 2000, 0
"""Crops, and the public seed of where they are cut."""
TOGETHER = 32
"""Crops that a map sees at once."""


class Projection(nn.Module):
    """(B, sum of d) features of maps side by side, each of length 1 -> (B, maps x D), each of length 1."""

    about = "projection"

    def __init__(self, widths: Sequence[int], width: int) -> None:
        """An unset projection. widths: d of each map. width: D."""
        super().__init__()
        self.widths, self.width = list(widths), width * len(widths)
        self.means = nn.ParameterList(nn.Parameter(torch.zeros(each), requires_grad=False) for each in widths)
        self.components = nn.ParameterList(
            nn.Parameter(torch.zeros(each, width), requires_grad=False) for each in widths
        )

    def forward(self, mapped: Tensor) -> Tensor:
        parts = zip(mapped.split(self.widths, dim=1), self.means, self.components, strict=True)
        projected = [normalise_rows((part - mean) @ components) for part, mean, components in parts]
        return projected[0] if len(projected) == 1 else torch.cat(projected, dim=1)


def build_projection(
    width: int, maps: Sequence[nn.Module], shape: tuple[int, ...], with_values: bool
) -> Projection:
    """The projection of the features of maps of images of this shape (C, H, W).

    with_values: False leaves it unset, for values of a saved model.
    Raises ConfigError for tables, of which there are no public ones, and if a map has too few features.
    """
    if len(shape) != 3:
        raise ConfigError(
            f"model.projection: it takes its components from public images, and the data has shape {shape}; "
            "allowed for tables: features: [inputs]"
        )
    widths = [int(module.width) for module in maps]  # pyright: ignore[reportArgumentType]
    most = min(*widths, IMAGES - 1)
    if width > most:
        raise ConfigError(
            f"model.projection: found {width}; with {IMAGES} images and maps of "
            f"{', '.join(map(str, widths))} features allowed: up to {most}"
        )
    built = Projection(widths, width)
    if with_values:
        for place, module in enumerate(maps):
            mean, components = _load_components(width, module, shape)
            built.means[place].data.copy_(mean)
            built.components[place].data.copy_(components)
    return built


def draw_crops(count: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """(count, C, H, W) float64 whole numbers in 0..255: random parts of the photographs, large and small."""
    channels, height, width = shape
    images = load_photographs(channels)
    generator = stream(seed, "crops", channels, height, width)
    largest = min(min(image.shape[1] / height, image.shape[2] / width) for image in images)
    crops = torch.empty(count, channels, height, width, dtype=torch.float64)
    for crop in crops:
        image = images[int(generator.integers(len(images)))]
        scale = largest ** generator.random() if largest > 1 else largest * (1 + generator.random()) / 2
        sides = max(1, int(height * scale)), max(1, int(width * scale))
        top = int(generator.integers(image.shape[1] - sides[0] + 1))
        left = int(generator.integers(image.shape[2] - sides[1] + 1))
        part = torch.from_numpy(image[:, top : top + sides[0], left : left + sides[1]].copy())
        crop.copy_(F.adaptive_avg_pool2d(part[None], (height, width))[0].round())
    return crops


def _load_components(width: int, module: nn.Module, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(mean (d,), whitened components (d, D)), from the cache where they were computed before."""
    about = f'{{"width":{width},"images":{IMAGES},"seed":{SEED}}} {shape} {RAISED} {MAPS_GRID} {MEAN_GRID}'
    key = hash_content([(about, {}), (str(module.about), module.state_dict())])
    path = find_cache_folder() / "projections" / f"{key}.safetensors"
    if path.is_file():
        found = parse_tensors(path.read_bytes(), path)
        return found["mean"], found["components"]
    crops = draw_crops(IMAGES, shape, SEED)
    mean, components = compute_components(_compute_features(module, crops), width)
    make_folder(path.parent)
    replace_file(path, save({"mean": mean, "components": components}))
    return mean, components


@torch.no_grad()
def _compute_features(module: nn.Module, crops: Tensor) -> Tensor:
    exact = copy.deepcopy(module).double()
    return torch.cat([normalise_rows(exact(part)) for part in crops.split(TOGETHER)])


def compute_components(features: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(mean (d,), components (d, D) divided by the root of their variance) float32, on their grids.

    features: (n, d) float64. Each component's largest value is positive, so that its sign is nobody's choice.
    """
    mean = (features.mean(dim=0) * MEAN_GRID).round() / MEAN_GRID
    centred = (features - mean).numpy()
    count, across = centred.shape
    # the smaller of the two matrices of products has the same eigenvalues
    if count < across:
        values, vectors = np.linalg.eigh(centred @ centred.T / count)
        vectors = centred.T @ vectors[:, -width:]
        vectors /= np.linalg.norm(vectors, axis=0)
    else:
        values, vectors = np.linalg.eigh(centred.T @ centred / count)
        vectors = vectors[:, -width:]
    vectors, kept = vectors[:, ::-1], values[-width:][::-1].clip(0)
    vectors = vectors * np.sign(vectors[np.abs(vectors).argmax(axis=0), np.arange(width)])
    whitened = vectors / np.sqrt(kept + RAISED * values.clip(0).sum() / across)
    return mean.float(), torch.from_numpy(np.rint(whitened * MAPS_GRID) / MAPS_GRID).float()
