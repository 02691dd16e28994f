"""perennial digest: what a site may lend."""

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
