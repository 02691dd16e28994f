"""perennial weights: checkpoints of networks that somebody trained elsewhere."""

from pathlib import Path
from typing import Annotated

import typer

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
    from perennial.models.feature_maps.imported import import_weights

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
