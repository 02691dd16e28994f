"""A table: experiments over seeds, and what is measured of each.

Tables are the TABLES of the modules in benchmarks/tables/. `python -m benchmarks NAME`
runs what is missing of one and writes NAME.jsonl (one object for each run) and NAME.md to the results.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Literal

from benchmarks.paper_claims import Claim
from perennial.config.experiment import Experiment, load_experiment
from perennial.foundation.errors import ConfigError, suggest_nearest
from perennial.foundation.plugins import use_also

ROOT = Path(__file__).resolve().parents[1]
"""Also the folder of the plug-ins of tables: experiments name them as benchmarks.MODULE:Class."""
EXPERIMENTS = ROOT / "experiments"
RESULTS = ROOT / "benchmarks" / "results"


RESULTS_REVISION = 2
"""Raised by a change that makes earlier results another experiment's, though the settings are the same."""
TEN_SEEDS = tuple(range(1, 11))
"""For tables with claims whose runs take less than a minute: five seeds leave too many claims undecided."""
OLD_REVISIONS: Mapping[int, str] = {
    1: "made before the keyed split, when a permutation of each class decided what was held out"
}
"""Results without a revision are of the first."""


@dataclass(frozen=True)
class Row:
    """One line of a table: an experiment file with changes (KEY=VALUE), and the paper's figures.

    The paper's figures are by measure, in per cent. attack: what dishonest sites do
    (benchmarks/dishonest.py); "": all are honest, beside rows in which some are not; None: a
    row of another table.
    """

    label: str
    experiment: str
    changes: tuple[str, ...] = ()
    paper: Mapping[str, float] = field(default_factory=dict, hash=False)
    attack: str | None = None

    @property
    def file(self) -> Path:
        return EXPERIMENTS / f"{self.experiment}.yaml"

    def load(self, seed: int) -> Experiment:
        """The experiment of one seed, resolved."""
        with use_also([ROOT]):
            return load_experiment(self.file, list(self.changes), seed)


Measure = Callable[[dict[str, Any]], float | None]
"""From summary.json to one number, as a share; None where the run did not measure it."""


def of(key: str) -> Measure:
    """The number under a key of summary.json."""
    return lambda summary: summary[key]


STANDARD: Mapping[str, Measure] = {
    "final accuracy": of("final_accuracy"),
    "average incremental accuracy": of("average_incremental_accuracy"),
    "forgetting": of("forgetting"),
}


@dataclass(frozen=True)
class Table:
    """Rows and measures of one table, over seeds.

    note: what a reader must know, in Markdown.
    claims: what papers say of its rows.
    scale: "paper" for the papers' own sizes, which want a GPU and start only when asked for; "hours" for what
    takes a processor hours.
    plain: measures that are no shares and are printed as they are; infinity as a sign.
    features_once: whether runs of one process share the features of pretrained networks.
    pending: why runs of it are missing still, as a sentence for its page; '' for a table that is run whole.
    """

    title: str
    rows: Sequence[Row]
    seeds: Sequence[int] = (1, 2, 3, 4, 5)
    measures: Mapping[str, Measure] = field(default_factory=lambda: STANDARD)
    note: str = ""
    claims: Sequence[Claim] = ()
    scale: Literal["cpu", "hours", "paper"] = "cpu"
    plain: frozenset[str] = frozenset()
    features_once: bool = False
    pending: str = ""

    @property
    def planned(self) -> int:
        """How many runs the whole table has."""
        return len(self.rows) * len(self.seeds)

    def measured(self, summary: dict[str, Any]) -> dict[str, float]:
        """Every measure of one run, to six decimal places; NaN for what the run did not measure."""
        values = {head: measure(summary) for head, measure in self.measures.items()}
        return {head: math.nan if value is None else round(value, 6) for head, value in values.items()}


def tables() -> dict[str, Table]:
    """Every table by name: the TABLES of all modules in benchmarks/tables/."""
    found: dict[str, Table] = {}
    for module in iter_modules([str(Path(__file__).parent / "tables")]):
        found |= import_module(f"benchmarks.tables.{module.name}").TABLES
    return found


def table_called(name: str) -> Table:
    """Raises ConfigError naming the nearest table."""
    found = tables()
    if name not in found:
        raise ConfigError(
            f"no table {name!r}{suggest_nearest(name, found)}; tables: {', '.join(sorted(found)) or 'none'}"
        )
    return found[name]
