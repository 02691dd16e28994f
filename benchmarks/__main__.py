"""`python -m benchmarks`: make the tables of `benchmarks/results/` again, or list them."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Literal

import typer

from benchmarks.grid import finished, run_table
from benchmarks.kept_features import kept_features
from benchmarks.table import table_called, tables
from perennial.foundation.errors import ConfigError, PerennialError

CHECKOUT = Path("benchmarks/results")
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def bench(
    names: Annotated[list[str] | None, typer.Argument(help="tables; none: list them")] = None,
    workers: Annotated[int, typer.Option(min=1, help="runs at the same time")] = 1,
    scale: Annotated[
        Literal["cpu", "paper"], typer.Option(help="paper: start a table of the paper's size")
    ] = "cpu",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    results: Annotated[Path | None, typer.Option(help="folder of results")] = None,
    only: Annotated[str, typer.Option(help="run the rows whose labels contain this")] = "",
    keep: Annotated[
        Path | None, typer.Option(help="keep run folders here; what was stopped goes on there")
    ] = None,
) -> None:
    """Regenerate tables over seeds; results that exist already are kept."""
    if not names:
        for name, table in sorted(tables().items()):
            typer.echo(f"{name} ({table.scale}): {table.title}")
        return
    folder = results or (CHECKOUT if CHECKOUT.is_dir() else Path("results"))
    for name in names:
        table = table_called(name)
        if table.scale == "paper" and scale != "paper":
            raise ConfigError(f"{name}: a table of the paper's size; start it with --scale paper")
        with kept_features() if table.features_once else nullcontext():
            missing = table.planned - len(finished(table, folder / f"{name}.jsonl"))
            typer.echo(f"{name}: {missing} runs are missing")
            run_table(
                name,
                table,
                typer.echo,
                workers=workers,
                device=device,
                results=folder,
                only=only,
                keep=keep,
            )
        typer.echo(f"{folder / name}.md")


if __name__ == "__main__":
    try:
        app()
    except PerennialError as error:
        typer.echo(f"benchmarks: {error}", err=True)
        sys.exit(2)
