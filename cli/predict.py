"""perennial predict."""

from pathlib import Path

import typer


def predict_command(run: Path, paths: list[Path], site: str) -> None:
    """Print path (or row), class and confidence, tab-separated. site: whose own model; "": the global one.

    The classifier is the one that the experiment judged: the head, or the nearest class mean where the file
    holds means. Where only the sites have means, the global model answers with its head, and standard error
    says so.
    """
    from perennial.library import Model
    from perennial.models.saved import load_saved, model_file

    saved = load_saved(model_file(run, site))
    if saved.class_means is None and saved.settings["learner"]["classifier"] == "nearest_mean":
        typer.echo(
            "predict: by the head; this run was judged by each site's own class means, which never left the "
            "sites: --site NAME uses those of one",
            err=True,
        )
    model = Model(saved)
    for names, labels, confidences in model.batches(paths):
        for name, index, confidence in zip(names, labels, confidences, strict=True):
            typer.echo(f"{name}\t{saved.classes[index]}\t{confidence:.4f}")
