"""perennial export."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from perennial.foundation.errors import PerennialError, StateError
from perennial.foundation.files import make_folder, replace_file

if TYPE_CHECKING:
    from perennial.models.saved import Inputs


def _image_facts(inputs: "Inputs") -> dict[str, str]:
    """How an image file becomes the model's input; nothing for rows of a table."""
    if len(inputs.shape) != 3 or inputs.stored != "uint8":
        return {}
    from perennial.data.images import RESIZING

    channels, height, width = inputs.shape
    colour = "grey (ITU-R 601 luma)" if channels == 1 else "red, green, blue"
    return {
        "layout": f"(batch, {channels}, {height}, {width}): {colour}; rows from the top",
        "resizing": f"to {height} rows by {width} columns, {RESIZING}",
    }


def export_command(run: Path, output: Path, onnx: bool) -> None:
    """Write model.safetensors and model.json (and model.onnx) to output.

    model.onnx is the classifier that the experiment judged: its outputs are the head's logits, or minus the
    squared distances from the class means where the run has global ones. Raises StateError when output
    cannot be written to, or is the run's own folder.
    """
    from perennial.models.saved import load_saved

    saved = load_saved(run / "model.safetensors")
    make_folder(output, mode=0o755)
    if output.samefile(run):
        raise StateError(f"export --output: {output} is the run's own folder; allowed: another one")
    replace_file(output / "model.safetensors", (run / "model.safetensors").read_bytes(), mode=0o644)
    facts = {
        "classes": saved.classes,
        "inputs": saved.inputs.to_json(),
        "input": "8-bit values / 255, then (x - mean) / std"
        if saved.inputs.stored == "uint8"
        else "(x - mean) / std; a missing number is its mean",
        **_image_facts(saved.inputs),
        "model": saved.settings["model"],
        "classifier": "head" if saved.class_means is None else "nearest_mean",
    }
    replace_file(output / "model.json", (json.dumps(facts, indent=2) + "\n").encode(), mode=0o644)
    if onnx:
        import torch

        try:
            import onnxscript  # noqa: F401  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise PerennialError(
                "export --onnx: needs packages onnx and onnxscript: pip install onnx onnxscript"
            ) from None
        example = torch.zeros(2, *saved.inputs.shape)
        torch.onnx.export(
            saved.classifier,
            (example,),
            str(output / "model.onnx"),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
        )
    typer.echo(output)
