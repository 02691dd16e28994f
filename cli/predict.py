"""perennial predict."""

from pathlib import Path

import torch
import typer

from perennial.foundation.errors import StateError, nearest


@torch.no_grad()
def predict_command(run: Path, paths: list[Path], site: str) -> None:
    """Print path (or row), class and confidence, tab-separated. site: whose own model; "": the global one.

    The classifier is the one that the experiment judged: the head, or the nearest class mean where the file
    holds means. Where only the sites have means, the global model answers with its head, and standard error
    says so.
    """
    from perennial.data.augmentation import to_float
    from perennial.data.inputs import read_inputs
    from perennial.models.saved import load_saved

    saved = load_saved(model_file(run, site))
    if saved.class_means is None and saved.settings["learner"]["classifier"] == "nearest_mean":
        typer.echo(
            "predict: by the head; this run was judged by each site's own class means, which never left the "
            "sites: --site NAME uses those of one",
            err=True,
        )
    inputs, classifier = saved.inputs, saved.classifier
    for names, x in read_inputs(paths, inputs.shape, inputs.stored, inputs.mean, inputs.columns):
        probability, label = classifier(to_float(x, inputs.mean, inputs.std)).softmax(dim=1).max(dim=1)
        for name, index, confidence in zip(names, label.tolist(), probability.tolist(), strict=True):
            typer.echo(f"{name}\t{saved.classes[index]}\t{confidence:.4f}")


def model_file(folder: Path, site: str) -> Path:
    """The model to use. folder: of a run, or a real site's state folder, which holds its own model alone.

    Raises StateError when the site has no model of its own there.
    """
    from perennial.models.saved import GLOBAL_MODEL, PERSONAL_MODEL

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
