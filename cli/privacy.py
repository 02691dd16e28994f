"""perennial epsilon, perennial ledger, perennial audit and perennial attack."""

import json
import math
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from perennial.foundation.errors import PrivacyError, StateError
from perennial.privacy.budget import Budget
from perennial.privacy.ledger import Ledger, Limit


def epsilon_command(
    epsilon: float | None,
    delta: float | None,
    noise_multiplier: float | None,
    sample_rate: float,
    steps: int | None,
    accountant: str,
) -> str:
    """The value of the one quantity that is None, as text."""
    if accountant not in ("prv", "rdp"):
        raise PrivacyError(f"--accountant: found {accountant!r}, allowed prv or rdp")
    budget = Budget(epsilon, delta, noise_multiplier, sample_rate, steps)
    known = vars(budget)
    (missing,) = [name for name, value in known.items() if value is None]
    return f"{getattr(budget.solve(accountant), missing):.6g}"


def ledger_command(state_dir: Path, delta: float, max_epsilon: float | None) -> None:
    """Print every release of a site, what they cost together, and any Bayesian figures."""
    from perennial.client.activity import run_names
    from perennial.client.record_figures import record_figures
    from perennial.learning.bayesian_estimate import bayesian_figure_of, runs_with_bayesian_figure
    from perennial.privacy.composition import compose

    ledger = Ledger(state_dir)
    if not ledger.started:
        raise StateError(
            f"{ledger.path}: no ledger here; allowed: the state_dir of a site that has released something"
        )
    console = Console()
    table = Table("time", "run", "recipient", "kind", "unit", "mechanism", "multiplier", "rate", "steps")
    entries, names = ledger.entries(), run_names(state_dir)
    for entry in entries:
        numbers = (entry.noise_multiplier, entry.sample_rate, entry.steps)
        table.add_row(
            entry.time,
            escape(f"{names[entry.run]} ({entry.run[:8]})") if entry.run in names else entry.run[:12],
            entry.recipient,
            entry.kind,
            entry.unit,
            f"{entry.mechanism}, seeded" if entry.seeded else entry.mechanism,
            *["" if number is None else f"{number:g}" for number in numbers],
        )
    console.print(table)
    cost = ledger.cost(delta)
    console.print(f"{cost.releases} releases, epsilon {cost.epsilon:.4g} at delta {delta:g}", highlight=False)
    for run in runs_with_bayesian_figure(state_dir):
        figure = bayesian_figure_of(state_dir, run)
        assert figure is not None
        worst = compose([entry for entry in entries if entry.run == run], figure.delta)
        text = f"epsilon {figure.epsilon:.4g}" if figure.epsilon is not None else f"none: {figure.void}"
        console.print(
            f"run {run[:12]}: worst case epsilon {worst.epsilon:.4g}, typical record {text}, at delta "
            f"{figure.delta:g} ({figure.invocations} of {figure.planned} planned invocations; outliers are "
            "not covered, and the two do not compare)",
            highlight=False,
            soft_wrap=True,
        )
    limit = None if max_epsilon is None else Limit(max_epsilon, delta)
    records = record_figures(state_dir, delta, limit)
    if records is not None:
        console.print(f"{records}; these figures depend on single records: keep them here", highlight=False)
    if max_epsilon is not None:
        console.print(f"left of {max_epsilon:g}: {max(0.0, max_epsilon - cost.epsilon):.4g}", highlight=False)


def attack_command(run: Path, victims: int, steps: int) -> None:
    """Run the attacks that apply, print their figures, and say where the pictures are."""
    from perennial.server.attacks.run import attack_run

    console = Console(highlight=False)
    for entry in attack_run(run, victims, steps):
        table = Table(entry["name"], "")
        for name, value in entry["figures"].items():
            table.add_row(name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
        console.print(table)
        for image in entry.get("images", []):
            console.print(f"picture: {run / image}", markup=False, soft_wrap=True)
    console.print(f"report: {run / 'report.html'}", markup=False, soft_wrap=True)


def audit_command(path: Path, overrides: list[str], canaries: int, others: int, results: Path | None) -> None:
    """Print the claim and what was found against it. Raises PrivacyError on any contradiction."""
    from perennial.config.experiment import load_experiment
    from perennial.engine.dp_audit import audit_experiment

    experiment = load_experiment(path, overrides)
    audit = audit_experiment(experiment, canaries, others)
    found = audit.found
    Console(highlight=False, markup=False).print(
        f"claim: epsilon {audit.claim:.4g} for one {audit.unit} at delta {found.delta:g} "
        f"(mode {audit.mode})\n"
        f"floor: epsilon {found.epsilon_floor:.4g} at {found.confidence:.0%} confidence, from one run with "
        f"{found.canaries} canaries: {found.right} of {found.guesses} guesses right; so many cannot refute a "
        f"claim above {found.refutable:.4g}\n"
        f"estimate: mu {audit.mu.mu:.3g} (95 % interval {audit.mu.low:.3g} to {audit.mu.high:.3g}), the "
        f"claim is worth {audit.mu.claimed:.3g}; it assumes scores that are normal with one variance\n"
        f"white box: {audit.watched} releases watched; {len(audit.objections)} objections to their noise, "
        "clip, sampling and charges",
        soft_wrap=True,
    )
    if results is not None:
        line = {
            "experiment": path.stem,
            "settings": overrides,
            "mode": audit.mode,
            "unit": audit.unit,
            "claim": audit.claim if math.isfinite(audit.claim) else None,
            **vars(found),
            "mu": {key: value for key, value in vars(audit.mu).items() if math.isfinite(value)},
            "watched": audit.watched,
            "objections": list(audit.objections),
        }
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
    if audit.contradictions:
        raise PrivacyError("; ".join(audit.contradictions))
