"""perennial epsilon, perennial ledger and perennial attack."""

from pathlib import Path
from typing import Annotated

import typer

from perennial.foundation.errors import PrivacyError, StateError


def epsilon_command(
    noise_multiplier: Annotated[
        float | None, typer.Option(help="standard deviation over sensitivity")
    ] = None,
    sample_rate: Annotated[float, typer.Option(help="Poisson sampling rate; 1 without sampling")] = 1.0,
    steps: Annotated[int | None, typer.Option(help="releases")] = None,
    delta: Annotated[float | None, typer.Option()] = None,
    target: Annotated[float | None, typer.Option("--epsilon", help="leave out to solve for it")] = None,
    accountant: Annotated[str, typer.Option(help="prv or rdp")] = "prv",
) -> None:
    """Solve for whichever of epsilon, delta, noise multiplier and steps is left out; prints one number."""
    from perennial.privacy.budget import Budget

    if accountant not in ("prv", "rdp"):
        raise PrivacyError(f"--accountant: found {accountant!r}, allowed prv or rdp")
    budget = Budget(target, delta, noise_multiplier, sample_rate, steps)
    known = vars(budget)
    (missing,) = [name for name, value in known.items() if value is None]
    typer.echo(f"{getattr(budget.solve(accountant), missing):.6g}")


def ledger_command(
    state_dir: Annotated[Path, typer.Argument(help="the site's state_dir")],
    delta: Annotated[float, typer.Option()] = 1e-5,
    max_epsilon: Annotated[float | None, typer.Option(help="lifetime budget, to see what is left")] = None,
) -> None:
    """Show what a site has released, to whom, at what cost."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    from perennial.client.activity import run_names
    from perennial.learning.bayesian_estimate import list_bayesian_runs, read_bayesian_figure
    from perennial.privacy.composition import compose
    from perennial.privacy.ledger import Ledger
    from perennial.protocol.stamp import RUN_TOKEN

    ledger = Ledger(state_dir)
    if not ledger.started:
        raise StateError(
            f"{ledger.path}: no ledger here; allowed: the state_dir of a site that has released something"
        )
    console = Console()
    # commands take the whole token of a run, so it stays in one piece
    run_column = Column("run", min_width=RUN_TOKEN)
    table = Table("time", run_column, "recipient", "kind", "unit", "mechanism", "multiplier", "rate", "steps")
    entries, names = ledger.read_entries(), run_names(state_dir)
    for entry in entries:
        numbers = (entry.noise_multiplier, entry.sample_rate, entry.steps)
        table.add_row(
            entry.time,
            escape(f"{names.get(entry.run, '')} {entry.run}".strip()),
            entry.recipient,
            entry.kind,
            entry.unit,
            f"{entry.mechanism}, seeded" if entry.seeded else entry.mechanism,
            *["" if number is None else f"{number:g}" for number in numbers],
        )
    console.print(table)
    cost = ledger.cost(delta)
    console.print(f"{cost.releases} releases, epsilon {cost.epsilon:.4g} at delta {delta:g}", highlight=False)
    for run in list_bayesian_runs(state_dir):
        figure = read_bayesian_figure(state_dir, run)
        assert figure is not None
        worst = compose([entry for entry in entries if entry.run == run], figure.delta)
        text = f"epsilon {figure.epsilon:.4g}" if figure.epsilon is not None else f"none: {figure.void}"
        console.print(
            f"run {run}: worst case epsilon {worst.epsilon:.4g}, typical record {text}, at delta "
            f"{figure.delta:g} ({figure.invocations} of {figure.planned} planned invocations; outliers are "
            "not covered, and the two do not compare)",
            highlight=False,
            soft_wrap=True,
        )
    if max_epsilon is not None:
        console.print(f"left of {max_epsilon:g}: {max(0.0, max_epsilon - cost.epsilon):.4g}", highlight=False)


def attack_command(
    run: Annotated[Path, typer.Argument(help="folder of a finished run")],
    victims: Annotated[int, typer.Option(min=1, help="images to reconstruct")] = 6,
    steps: Annotated[int, typer.Option(min=1, help="of each reconstruction")] = 400,
) -> None:
    """Attack a run, by membership inference and others, and add pictures to its report."""
    from rich.console import Console
    from rich.table import Table

    from perennial.server.attacks import attack_run

    console = Console(highlight=False)
    for entry in attack_run(run, victims, steps):
        table = Table(entry["name"], "")
        for name, value in entry["figures"].items():
            table.add_row(name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
        console.print(table)
        for image in entry.get("images", []):
            console.print(f"picture: {run / image}", markup=False, soft_wrap=True)
    console.print(f"report: {run / 'report.html'}", markup=False, soft_wrap=True)
