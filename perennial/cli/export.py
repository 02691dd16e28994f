"""perennial export, and perennial weights: checkpoints of networks that somebody trained elsewhere."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perennial.foundation.errors import PerennialError, StateError
from perennial.foundation.files import make_folder, replace_file

if TYPE_CHECKING:
    from perennial.models.saved import Inputs, SavedModel


def _describe_images(inputs: "Inputs", data: Mapping[str, Any]) -> dict[str, str]:
    """How an image file becomes the model's input; nothing for rows of a table."""
    if len(inputs.shape) != 3 or inputs.stored != "uint8":
        return {}
    from perennial.data.images import RESIZING

    channels, height, width = inputs.shape
    colour = "grey (ITU-R 601 luma)" if channels == 1 else "red, green, blue"
    layout = f"(batch, {channels}, {height}, {width}): {colour}; rows from the top"
    return {
        "layout": layout,
        "resizing": f"to {height} rows by {width} columns, {RESIZING[data.get('resize', 'stretch')]}",
        **(
            {"window": f"{data['window']}: the values that become black and white"}
            if "window" in data
            else {}
        ),
    }


RAW = (
    "raw values, as `stored` and `names` say; scaling to (x - mean) / std and what stands for a missing "
    "value (NaN) are inside the file: do neither before"
)
"""What model.onnx takes, which model.safetensors does not."""


def _describe_table(inputs: "Inputs") -> dict[str, list[str]]:
    """What each number of a row is; nothing for images."""
    if inputs.columns is None:
        return {}
    from perennial.data.table_columns import name_features

    return {"names": name_features(inputs.columns)}


def export_command(
    run: Annotated[Path, typer.Argument(help="run folder")],
    output: Annotated[Path, typer.Option(help="folder to write to")] = Path("export"),
    onnx: Annotated[bool, typer.Option(help="write model.onnx too (needs the extra onnx)")] = False,
) -> None:
    """Copy the model to a folder: safetensors, class names, facts about inputs; ONNX on request."""
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
        else "(x - mean) / std; a missing number (NaN) is its fill first, or else its mean",
        **_describe_table(saved.inputs),
        **_describe_images(saved.inputs, saved.settings["data"]),
        "model": saved.settings["model"],
        "classifier": saved.classifier_name,
        "confidence": saved.confidence.to_json(),
    }
    replace_file(output / "model.json", (json.dumps(facts, indent=2) + "\n").encode(), mode=0o644)
    if onnx:
        _write_onnx(saved, output / "model.onnx", {**facts, "input": RAW})
    typer.echo(output)


def _write_onnx(saved: "SavedModel", path: Path, facts: Mapping[str, Any]) -> None:
    """Preprocessing, network, temperature and softmax in one file, with class names as its metadata.

    It is the classifier that the experiment judged, with the head, global class means or a Gaussian head. It
    takes samples as the data hold them (RAW) and gives `probabilities` and `class_index`, and
    `at_operating_point` for the points of `confidence`, in their order.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError:
        raise PerennialError("export --onnx: needs the extra onnx: pip install perennial-fl[onnx]") from None
    import torch

    from perennial.models.prediction import Exported

    module = Exported(saved).eval()
    program = torch.onnx.export(
        module,
        (module.build_example(saved),),
        input_names=["samples"],
        output_names=["probabilities", "class_index", *["at_operating_point"] * bool(module.points)],
        dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        verbose=False,
    )
    assert program is not None
    proto = program.model_proto
    if not proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param:
        raise PerennialError(
            f"export --onnx: model {saved.settings['model']['name']}: the file would take "
            "no other number of samples than the exporter's example; use model.safetensors"
        )
    onnx.helper.set_model_props(proto, {name: json.dumps(value) for name, value in facts.items()})
    replace_file(path, proto.SerializeToString(deterministic=True), mode=0o644)


weights = typer.Typer(
    suggest_commands=False, no_args_is_help=True, help="Weights of networks that were trained elsewhere."
)


@weights.callback()
def _group() -> None:
    """Weights of networks that were trained elsewhere."""


@weights.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="a checkpoint: .safetensors, or .onnx for its initialisers")],
    network: Annotated[str, typer.Option(help="timm's name of the network")],
) -> None:
    """Put a checkpoint into the cache by timm's names, and print what the experiment says of it."""
    from perennial.models.feature_maps.weights import import_weights

    found = import_weights(file, network)
    if found.left_out:
        typer.echo(
            f"{len(found.left_out)} tensors left out, which the network without its classifier has not:"
        )
        for name in found.left_out[:10]:
            typer.echo(f"  {name}")
    typer.echo(f"{found.path}")
    mean, std = ([round(float(value), 6) for value in each] for each in (found.mean, found.std))
    typer.echo(f"{{name: pretrained, network: {network}, sha256: {found.sha256}, mean: {mean}, std: {std}}}")
    typer.echo("add image_size, and licence as the weights have it")
