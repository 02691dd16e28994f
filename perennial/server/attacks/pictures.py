"""What attacks on images share: the victims, the model as a function of pixels, and the picture."""

import io
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from perennial.data.federation import SimulatedFederation
from perennial.foundation.files import make_folder, replace_file
from perennial.foundation.streams import stream
from perennial.models.incremental import IncrementalModel
from perennial.models.saved import SavedModel
from perennial.privacy.config import PrivacyConfig

ZOOM = 12
REFERENCE = PrivacyConfig(mode="client_local", clip_norm=1.0, noise_multiplier=1.0)
"""Beside a run without protection: what an attack does against the weakest noise that has an epsilon."""


def pixels_of(stored: Tensor) -> Tensor:
    """(N, C, H, W) images in [0, 1]. stored: uint8, or float32."""
    return stored.float() / 255 if stored.dtype == torch.uint8 else stored.clamp(0, 1)


def victims_of(federation: SimulatedFederation, count: int, seed: int) -> Tensor:
    """Rows of `count` training samples of any site, drawn at random; fewer if there are fewer."""
    rows = torch.cat([site.train for site in federation.sites.values()])
    order = stream(seed, "attack-victims").permutation(len(rows))[:count]
    return rows[torch.from_numpy(np.ascontiguousarray(order))]


def write_picture(folder: Path, name: str, rows: list[Tensor]) -> str:
    """Put picture(rows) into the run folder; returns its path there."""
    make_folder(folder / "attacks")
    replace_file(folder / "attacks" / name, picture(rows))
    return f"attacks/{name}"


def picture(rows: list[Tensor]) -> bytes:
    """PNG of rows of images, each (N, C, H, W) in [0, 1], enlarged without smoothing, with white lines."""
    from PIL import Image

    grid = F.pad(torch.stack(rows), (0, 1, 0, 1), value=1.0)
    count, width, channels, high, wide = grid.shape
    whole = grid.permute(0, 3, 1, 4, 2).reshape(count * high, width * wide, channels)
    pixels = whole.clamp(0, 1).mul(255).round().to(torch.uint8).numpy()
    pixels = pixels[..., 0] if channels == 1 else pixels[..., :3]
    image = Image.fromarray(pixels)
    file = io.BytesIO()
    image.resize((image.width * ZOOM, image.height * ZOOM), Image.Resampling.NEAREST).save(file, format="PNG")
    return file.getvalue()


class Pixels(torch.nn.Module):
    """The model as a function of images in [0, 1], which is what an attacker searches for."""

    def __init__(self, model: IncrementalModel, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", mean.view(-1, 1, 1))
        self.register_buffer("std", std.view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """(B, M) logits of (B, C, H, W) images."""
        return self.model((images - self.get_buffer("mean")) / self.get_buffer("std"))


def of_pixels(saved: SavedModel) -> Pixels:
    """The saved model on images in [0, 1]; its head is the entry HEAD of a gradient."""
    return Pixels(saved.model, saved.inputs.mean, saved.inputs.std).eval()
