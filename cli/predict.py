"""perennial predict."""

from pathlib import Path

import torch
import typer

from foundation.errors import DataError

BATCH = 256


@torch.no_grad()
def predict_command(run: Path, paths: list[Path]) -> None:
    """Print path (or row), class and confidence, tab-separated."""
    from data.augmentation import to_float
    from models.saved import load_saved

    saved = load_saved(run / "model.safetensors")
    if len(saved.input_shape) != 3:
        raise DataError("predict: this run's model takes rows of a table; allowed here: models of images")
    from data.images import read_images

    channels, height, width = saved.input_shape
    for start in range(0, len(paths), BATCH):
        part = paths[start : start + BATCH]
        images = torch.from_numpy(read_images(part, (height, width), "gray" if channels == 1 else "rgb"))
        probability, label = saved.model(to_float(images, saved.mean, saved.std)).softmax(dim=1).max(dim=1)
        for path, index, confidence in zip(part, label.tolist(), probability.tolist(), strict=True):
            typer.echo(f"{path}\t{saved.classes[index]}\t{confidence:.4f}")
