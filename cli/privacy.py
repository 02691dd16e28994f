"""perennial epsilon and perennial ledger."""

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
