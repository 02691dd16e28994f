"""perennial digest: what a site may lend, and the encoders that make it."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(suggest_commands=False, no_args_is_help=True, help="Digests that a site may lend.")


@app.callback()
def digest() -> None:
    """Digests that a site may lend."""


@app.command()
def preview(
    site: Annotated[Path, typer.Argument(help="site.yaml")],
    experiment: Annotated[Path, typer.Option(help="the experiment that asks for digests")],
    task: Annotated[int, typer.Option(min=1)] = 1,
    output: Annotated[Path, typer.Option(help="folder for the picture")] = Path("digest-preview"),
) -> None:
    """What this site's digests would give away, before it agrees to send them; nothing leaves."""
    from perennial.cli.digest_preview import preview_command

    typer.echo(preview_command(site, experiment, task, output))


@app.command()
def train_encoder(
    settings: Annotated[Path, typer.Argument(help="YAML: a data block, and how long to train")],
    output: Annotated[Path, typer.Argument(help="file to write, .safetensors")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, e.g. seed=2")] = None,
) -> None:
    """Train an encoder of digests on public data; its weights reveal something of that data to every site."""
    from perennial.cli.encoder import train_encoder_command

    typer.echo(train_encoder_command(settings, output, overrides or [], typer.echo))
