"""Runs the attacks that apply to a finished run, and adds figures and pictures to its report.

Members and victims are training samples, so this runs where the data is: in simulation, or at a site that
tests its own claims. Nothing here leaves the run folder.
"""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from perennial.config.experiment import Experiment
from perennial.config.simulation import load_simulated_federation
from perennial.data.federation import SimulatedFederation
from perennial.foundation.errors import DataError, StateError
from perennial.foundation.files import make_folder, replace_file
from perennial.foundation.streams import stream, torch_seed
from perennial.learning.batches import to_float
from perennial.models.incremental import IncrementalModel
from perennial.models.saved import SavedModel, load_saved
from perennial.privacy.attacks import (
    AttackStrength,
    invert_gradient,
    measure_similarity,
    run_likelihood_ratio,
    run_loss_threshold,
)
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.noise import Noise
from perennial.privacy.protection import protect_update
from perennial.server.report.write import write_report

VICTIMS = 6
STEPS = 400
BATCH = 1024
HEAD = "model.head.weight"
ZOOM = 12
REFERENCE = PrivacyConfig(mode="client_local", clip_norm=1.0, noise_multiplier=1.0)
"""Beside a run without protection: what an attack does against the weakest noise that has an epsilon."""


def attack_run(folder: Path, victims: int = VICTIMS, steps: int = STEPS) -> list[dict[str, Any]]:
    """Attack the run's final model, and add pictures and figures to its summary and report.

    victims: images to reconstruct.
    steps: of each reconstruction.
    Returns the block `attacks` of summary.json.

    Raises StateError when the run is not finished, DataError when its data is not here.
    """
    saved = load_saved(folder / "model.safetensors")
    experiment = Experiment.model_validate(saved.settings)
    if experiment.data.only_at_sites:
        raise DataError("data.path: missing; the attacks need the training samples, which stay at the sites")
    federation = load_simulated_federation(experiment)
    entries = [*infer_membership(saved, federation)]
    if len(saved.inputs.shape) == 3:
        entries.append(reconstruct_images(saved, experiment, federation, folder, victims, steps))
    path = folder / "summary.json"
    try:
        summary = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StateError(f"{path}: cannot be read ({error}); resume the run to write it again") from error
    replace_file(path, (json.dumps(summary | {"attacks": entries}, indent=2) + "\n").encode(), mode=0o644)
    write_report(folder)
    return entries


def infer_membership(saved: SavedModel, federation: SimulatedFederation) -> list[dict[str, Any]]:
    """Test whether the model tells training samples from others; returns the report's entries.

    Members: all sites' training samples. Others: half of the central test set; the likelihood ratio compares
    with the other half. [] without a test set.
    """
    if federation.test is None or len(federation.test.test) < 4:
        return []
    frame = federation.test
    members = torch.cat([site.train for site in federation.sites.values()])
    others, reference = frame.test[0::2], frame.test[1::2]
    scored = [(_compute_logits(saved, frame.x[rows]), frame.y[rows]) for rows in (members, others, reference)]
    inside, outside, held = scored
    losses = [F.cross_entropy(logits, labels, reduction="none") for logits, labels in (inside, outside)]
    sizes = {"members": len(members), "non_members": len(others)}
    return [
        {
            "name": "Membership, loss threshold",
            "figures": _collect_figures(run_loss_threshold(*losses)) | sizes,
        },
        {
            "name": "Membership, likelihood ratio",
            "figures": _collect_figures(run_likelihood_ratio(inside, outside, held)) | sizes,
        },
    ]


def reconstruct_images(
    saved: SavedModel,
    experiment: Experiment,
    federation: SimulatedFederation,
    folder: Path,
    victims: int,
    steps: int,
) -> dict[str, Any]:
    """Reconstruct images from the gradient of one sample, in the clear and protected; returns the entry.

    The picture has a row for the originals, then one for each kind of release, and a column for each victim.
    """
    model, privacy = of_pixels(saved), experiment.privacy
    if not privacy.enabled or not privacy.noise_multiplier:
        privacy = REFERENCE
    frame = next(iter(federation.sites.values()))
    chosen = draw_victims(federation, victims, experiment.seed)
    images, labels = scale_pixels(frame.x[chosen]), frame.y[chosen]
    rebuilt: dict[str, list[Tensor]] = {"in the clear": [], "protected": []}
    for number, (image, label) in enumerate(zip(images.split(1), labels.split(1), strict=True)):
        gradient = compute_gradient(model, image, label)
        for kind, found in rebuilt.items():
            if kind == "protected":
                gradient = protect_gradient(gradient, privacy)
            generator = torch.Generator().manual_seed(
                torch_seed(stream(experiment.seed, "attack-start", number))
            )
            shape = (images.shape[1], images.shape[2], images.shape[3])
            found.append(invert_gradient(model, gradient, shape, generator, head=HEAD, steps=steps).images)
    together = {kind: torch.cat(found) for kind, found in rebuilt.items()}
    likeness = {kind: measure_similarity(images, found).mean() for kind, found in together.items()}
    figures = {
        f"mean_structural_similarity_{kind.replace(' ', '_')}": mean.item() for kind, mean in likeness.items()
    }
    name = write_picture(folder, "inversion.png", [images, *together.values()])
    return {
        "name": "Gradient inversion: originals, from the clear release, from the protected one",
        "figures": {
            **figures,
            "victims": len(images),
            "clip_norm": privacy.clip_norm,
            "noise_multiplier": privacy.noise_multiplier,
            "mode": privacy.mode,
        },
        "images": [name],
    }


def compute_gradient(model: torch.nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Gradient of the cross entropy in the trained tensors, by name: one SGD step's update, unscaled."""
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    loss = F.cross_entropy(model(images), labels)
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def protect_gradient(gradient: dict[str, Tensor], privacy: PrivacyConfig) -> dict[str, Tensor]:
    """The gradient, clipped and noised as a site's update is."""
    assert privacy.clip_norm is not None and privacy.noise_multiplier is not None
    vector = torch.cat([part.reshape(-1) for part in gradient.values()])
    protect_update(vector, privacy.clip_norm, privacy.noise_multiplier, Noise())
    parts = vector.split([part.numel() for part in gradient.values()])
    return {name: part.view_as(old) for (name, old), part in zip(gradient.items(), parts, strict=True)}


@torch.no_grad()
def _compute_logits(saved: SavedModel, stored: Tensor) -> Tensor:
    return torch.cat(
        [saved.model(to_float(part, saved.inputs.mean, saved.inputs.std)) for part in stored.split(BATCH)]
    )


def _collect_figures(found: AttackStrength) -> dict[str, float]:
    return {"auc": found.auc, "tpr_at_1_percent_fpr": found.tpr_at_1_percent_fpr}


def scale_pixels(stored: Tensor) -> Tensor:
    """(N, C, H, W) images in [0, 1]. stored: uint8, or float32."""
    return stored.float() / 255 if stored.dtype == torch.uint8 else stored.clamp(0, 1)


def draw_victims(federation: SimulatedFederation, count: int, seed: int) -> Tensor:
    """Rows of `count` training samples of any site, drawn at random; fewer if there are fewer."""
    rows = torch.cat([site.train for site in federation.sites.values()])
    order = stream(seed, "attack-victims").permutation(len(rows))[:count]
    return rows[torch.from_numpy(np.ascontiguousarray(order))]


def write_picture(folder: Path, name: str, rows: list[Tensor]) -> str:
    """Put picture(rows) into the run folder; returns its path there."""
    make_folder(folder / "attacks")
    replace_file(folder / "attacks" / name, render_picture(rows))
    return f"attacks/{name}"


def render_picture(rows: list[Tensor]) -> bytes:
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
