"""Reconstructs images from single-sample gradients: in the clear, clipped only, and under a release's noise.

`python -m benchmarks.inversion` writes benchmarks/results/inversion.json, .md and .png. The images
are scikit-learn's digits; the model is small_cnn as the first round sends it out.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from perennial.data.config import DataConfig
from perennial.data.digits import load_digits
from perennial.foundation.streams import stream, torch_seed
from perennial.models.config import ModelConfig
from perennial.models.factory import build_model
from perennial.models.saved import Inputs, SavedModel
from perennial.privacy.attacks.gradient_inversion import invert_gradient
from perennial.privacy.attacks.similarity import structural_similarity
from perennial.privacy.config import PrivacyConfig
from perennial.server.attacks.pictures import of_pixels, picture
from perennial.server.attacks.run import HEAD, gradient_of, protected

RESULTS = Path(__file__).resolve().parent / "results"
VICTIMS, STEPS, RESTARTS, SEED = 6, 250, 2, 1
NOISES: Mapping[str, float | None] = {
    "in the clear": None,
    "clipped to norm 1, no noise": 0.0,
    "clipped to norm 1, sigma 1": 1.0,
}


def main() -> None:
    """Attack every victim under every release, and write figures and picture."""
    source = load_digits(DataConfig(source="digits"))
    model = build_model(ModelConfig.model_validate({"name": "small_cnn"}), (1, 8, 8), 10, SEED)
    inputs = Inputs((1, 8, 8), "uint8", source.mean, source.std)
    saved = SavedModel(model.eval(), source.classes, inputs, {})
    pixels = of_pixels(saved)
    chosen = stream(SEED, "attack-victims").permutation(len(source.train.y))[:VICTIMS]
    images, labels = source.train.x[chosen].float() / 255, source.train.y[chosen]
    found = {kind: [] for kind in NOISES}
    for number, (image, label) in enumerate(zip(images.split(1), labels.split(1), strict=True)):
        clear = gradient_of(pixels, image, label)
        for kind, noise in NOISES.items():
            found[kind].append(_inverted(pixels, _released(clear, noise, number), number))
    rebuilt = {kind: torch.cat(parts) for kind, parts in found.items()}
    figures = {kind: structural_similarity(images, parts).tolist() for kind, parts in rebuilt.items()}
    _write(figures, [images, *rebuilt.values()])


def _released(gradient: dict[str, Tensor], noise: float | None, number: int) -> dict[str, Tensor]:
    if noise is None:
        return gradient
    privacy = PrivacyConfig(mode="client_local", clip_norm=1.0, noise_multiplier=noise)
    return protected(gradient, privacy, SEED, number)


def _inverted(model: torch.nn.Module, gradient: dict[str, Tensor], number: int) -> Tensor:
    generator = torch.Generator().manual_seed(torch_seed(stream(SEED, "attack-start", number)))
    return invert_gradient(
        model, gradient, (1, 8, 8), generator, head=HEAD, steps=STEPS, restarts=RESTARTS
    ).images


def _write(figures: Mapping[str, list[float]], rows: list[Tensor]) -> None:
    means = {kind: sum(values) / len(values) for kind, values in figures.items()}
    content = {"victims": VICTIMS, "steps": STEPS, "restarts": RESTARTS, "mean": means, "each": figures}
    (RESULTS / "inversion.json").write_text(json.dumps(content, indent=2) + "\n")
    lines = [
        "# Gradient inversion on digits",
        "",
        f"`python -m benchmarks.inversion`: {VICTIMS} victims, {STEPS} steps, best of {RESTARTS}; "
        "mean structural similarity of original and reconstruction (1: equal).",
        "",
        "| release | mean | lowest | highest |",
        "| --- | --- | --- | --- |",
        *[
            f"| {kind} | {means[kind]:.3f} | {min(values):.3f} | {max(values):.3f} |"
            for kind, values in figures.items()
        ],
        "",
        f"Rows of the picture: originals, then {', '.join(figures)}.",
        "",
        "![originals and reconstructions](inversion.png)",
    ]
    (RESULTS / "inversion.md").write_text("\n".join(lines) + "\n")
    (RESULTS / "inversion.png").write_bytes(picture(rows))


if __name__ == "__main__":
    main()
