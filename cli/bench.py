"""perennial bench."""

from importlib import import_module
from pathlib import Path

import typer

from perennial.foundation.errors import ConfigError

CHECKOUT = Path("benchmarks/results")
PROGRAMS = ("secure_cost",)
"""Measurements that write no table: modules of benchmarks/ with a main()."""


def bench_command(
    names: list[str], workers: int, scale: str, device: str, results: Path | None, estimate: bool
) -> None:
    """Print what the tables will cost, then make the runs that they lack; without a name, list the tables."""
    from perennial.benchmarks.table import table_called, tables

    measured = [name for name in names if name in PROGRAMS]
    for name in measured:
        import_module(f"perennial.benchmarks.{name}").main()
    names = [name for name in names if name not in PROGRAMS]
    if measured and not names:
        return
    if scale not in ("cpu", "paper"):
        raise ConfigError(f"--scale: found {scale!r}, allowed cpu or paper")
    if not names:
        for name, table in sorted(tables().items()):
            typer.echo(f"{name} ({table.scale}): {table.title}")
        for name in PROGRAMS:
            text = import_module(f"perennial.benchmarks.{name}").__doc__ or ""
            typer.echo(f"{name}: {text.splitlines()[0]}")
        return
    from perennial.benchmarks.cost import cost
    from perennial.benchmarks.grid import run_table

    folder = results or (CHECKOUT if CHECKOUT.is_dir() else Path("results"))
    for name in names:
        table = table_called(name)
        expected = cost(table, folder / f"{name}.jsonl", device)
        typer.echo(f"{name}: {expected.sentence(workers)}")
        if estimate:
            continue
        if table.scale == "paper" and scale != "paper":
            raise ConfigError(f"{name}: a table of the paper's size; start it with --scale paper")
        run_table(name, table, typer.echo, workers=workers, device=device, results=folder)
        typer.echo(f"{folder / name}.md")
