"""`python -m perennial.benchmarks.attacks`: attack a finished run, or audit the epsilon that one claims."""

import json
import math
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from perennial.benchmarks.attacks.dp_audit import audit_experiment
from perennial.benchmarks.attacks.run import attack_run
from perennial.config.experiment import load_experiment
from perennial.foundation.errors import PerennialError, PrivacyError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def audit(
    experiment: Annotated[Path, typer.Argument(help="experiment.yaml whose privacy block is audited")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE")] = None,
    canaries: Annotated[
        int, typer.Option(min=10, help="records, patients or sites that are in or out")
    ] = 200,
    others: Annotated[
        int, typer.Option(min=2, help="other records of a canary's class, in mode sample")
    ] = 20,
    results: Annotated[Path | None, typer.Option(help="file of JSON lines to add the figures to")] = None,
) -> None:
    """Hold the claimed epsilon against a bound that one run with worst-case records proves."""
    audited = load_experiment(experiment, overrides or [])
    made = audit_experiment(audited, canaries, others)
    found = made.found
    Console(highlight=False, markup=False).print(
        f"claim: epsilon {made.claim:.4g} for one {made.unit} at delta {found.delta:g} "
        f"(mode {made.mode})\n"
        f"floor: epsilon {found.epsilon_floor:.4g} at {found.confidence:.0%} confidence, from one run with "
        f"{found.canaries} canaries: {found.right} of {found.guesses} guesses right; so many cannot refute a "
        f"claim above {found.refutable:.4g}\n"
        f"estimate: mu {made.mu.mu:.3g} (95 % interval {made.mu.low:.3g} to {made.mu.high:.3g}), the "
        f"claim is worth {made.mu.claimed:.3g}; it assumes scores that are normal with one variance\n"
        f"white box: {made.watched} releases watched; {len(made.objections)} objections to their noise, "
        "clip, sampling and charges",
        soft_wrap=True,
    )
    if results is not None:
        line = {
            "experiment": experiment.stem,
            "settings": overrides,
            "mode": made.mode,
            "unit": made.unit,
            "claim": made.claim if math.isfinite(made.claim) else None,
            **vars(found),
            "mu": {key: value for key, value in vars(made.mu).items() if math.isfinite(value)},
            "watched": made.watched,
            "objections": list(made.objections),
        }
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
    if made.contradictions:
        raise PrivacyError("; ".join(made.contradictions))


@app.command()
def attack(
    run: Annotated[Path, typer.Argument(help="folder of a finished run")],
    victims: Annotated[int, typer.Option(min=1, help="images to reconstruct")] = 6,
    steps: Annotated[int, typer.Option(min=1, help="of each reconstruction")] = 400,
) -> None:
    """Attack a run, by membership inference and others, and add pictures to its report."""
    console = Console(highlight=False)
    for entry in attack_run(run, victims, steps):
        table = Table(entry["name"], "")
        for name, value in entry["figures"].items():
            table.add_row(name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
        console.print(table)
        for image in entry.get("images", []):
            console.print(f"picture: {run / image}", markup=False, soft_wrap=True)
    console.print(f"report: {run / 'report.html'}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    try:
        app()
    except PerennialError as error:
        typer.echo(f"perennial.benchmarks.attacks: {error}", err=True)
        sys.exit(2)
