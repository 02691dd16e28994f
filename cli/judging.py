"""perennial evaluate: its options; what it does is imported when it is called."""

from pathlib import Path
from typing import Annotated

import typer

from perennial.foundation.errors import ConfigError


def evaluate(
    run: Annotated[Path, typer.Argument(help="run folder")],
    data: Annotated[Path, typer.Argument(help="labelled data: a folder, CSV table, manifest or .npz file")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE of a data block, e.g. label_column=diagnosis")
    ] = None,
    site: Annotated[str, typer.Option(help="of a simulated run: use this site's own model")] = "",
    output: Annotated[
        Path | None, typer.Option(help="folder; default: RUN/evaluations/NAME of the data")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="run folder of the approved model, than which RUN may not be worse")
    ] = None,
    margin: Annotated[
        list[str] | None,
        typer.Option(help="how much worse, as a share: 0.05, and NAME=0.2 for a class, site or subgroup"),
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="state folder of a site: what it gave to any run is left out")
    ] = None,
    prevalence: Annotated[
        list[str] | None,
        typer.Option(help="NAME=SHARE: predictive values where a class is so frequent; may be given again"),
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="Ed25519 key that signs the verdict; default: your own, made once")
    ] = None,
) -> None:
    """Measure a finished model on other labelled data; with --against it must be as good as another one.

    Writes measures.json and report.html. Where the model is not shown to be as good, the exit status is 1.
    """
    from perennial.cli.evaluate import Against, evaluate_command

    if (against is None) != (margin is None):
        raise ConfigError("evaluate: --against and --margin belong together, and one is missing")
    gate = None if against is None else Against(against, margin or [], key)
    if not evaluate_command(run, data, overrides or [], site, output, gate, state, prevalence or []):
        raise typer.Exit(1)
