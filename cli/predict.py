"""perennial predict."""

from pathlib import Path

import torch
import typer

from foundation.errors import DataError, StateError, nearest

BATCH = 256


@torch.no_grad()
def predict_command(run: Path, paths: list[Path], site: str) -> None:
    """Print path (or row), class and confidence, tab-separated. site: whose own model; "": the global one."""
    from data.augmentation import to_float
    from models.saved import load_saved

    saved = load_saved(model_file(run, site))
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


def model_file(folder: Path, site: str) -> Path:
    """The model to use. folder: of a run, or a real site's state folder, which holds its own model alone.

    Raises StateError when the site has no model of its own there.
    """
    from models.saved import GLOBAL_MODEL, PERSONAL_MODEL

    if site:
        path = folder / "sites" / site / PERSONAL_MODEL
        if not path.exists():
            found = [other.parent.name for other in folder.glob(f"sites/*/{PERSONAL_MODEL}")]
            raise StateError(
                f"{path}: missing; {len(found)} sites have their own model{nearest(site, found)}, which a "
                "strategy that personalises makes at the end of a task"
            )
        return path
    own = folder / PERSONAL_MODEL
    return own if own.exists() else folder / GLOBAL_MODEL
