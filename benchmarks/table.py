"""A table: experiments over seeds, resumable, with a result file and a Markdown table of mean and deviation.

`python -m benchmarks.table NAME...` runs what is missing of the tables in benchmarks/tables/ and writes
benchmarks/results/NAME.jsonl (one object for each run) and NAME.md. A run that the file already holds for the
same resolved experiment is not run again.
"""

import json
import math
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from config.experiment import load_experiment
from config.run import RunSettings
from engine.run import run_in_process

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Row:
    """One line of a table: an experiment file with changes (KEY=VALUE), and the paper's figures by measure,
    in per cent."""

    label: str
    experiment: str
    changes: tuple[str, ...] = ()
    paper: Mapping[str, float] = field(default_factory=dict)


Measure = Callable[[dict[str, Any]], float]
"""From summary.json to one number, as a share."""


def of(key: str) -> Measure:
    """The number under a key of summary.json."""
    return lambda summary: float(summary[key])


STANDARD: Mapping[str, Measure] = {
    "final accuracy": of("final_accuracy"),
    "average incremental accuracy": of("average_incremental_accuracy"),
    "forgetting": of("forgetting"),
}


@dataclass(frozen=True)
class Table:
    """rows x measures, over seeds. note: what a reader must know, in Markdown.

    plain: measures that are no shares, and are printed as they are; infinity as a sign.
    """

    title: str
    rows: Sequence[Row]
    seeds: Sequence[int] = (1, 2, 3)
    measures: Mapping[str, Measure] = field(default_factory=lambda: STANDARD)
    note: str = ""
    plain: frozenset[str] = frozenset()


def tables() -> dict[str, Table]:
    """Every table by name: the TABLES of all modules in benchmarks/tables/."""
    found: dict[str, Table] = {}
    for module in iter_modules([str(ROOT / "benchmarks" / "tables")]):
        found |= import_module(f"benchmarks.tables.{module.name}").TABLES
    return found


def run_table(name: str, table: Table, say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Run what is missing, appending to the result file after each run; returns all of the table's runs."""
    path = RESULTS / f"{name}.jsonl"
    done = {(run["row"], run["seed"], run["digest"]): run for run in _read(path)}
    runs = []
    for row in table.rows:
        for seed in table.seeds:
            file = ROOT / "experiments" / f"{row.experiment}.yaml"
            digest = load_experiment(file, list(row.changes), seed).digest
            key = (row.label, seed, digest)
            if key not in done:
                done[key] = _run(table, row, seed, digest)
                with path.open("a") as results:
                    results.write(json.dumps(done[key]) + "\n")
                say(f"{name}: {row.label}, seed {seed}: {done[key]['measures']}")
            runs.append(done[key])
    # runs of rows that have changed since are no longer part of the table
    path.write_text("".join(json.dumps(run) + "\n" for run in runs))
    (RESULTS / f"{name}.md").write_text(markdown(name, table, runs))
    return runs


def markdown(name: str, table: Table, runs: Sequence[Mapping[str, Any]]) -> str:
    """Mean and standard deviation (ddof 1) over seeds, in per cent, the paper's figure beside ours."""
    heads = list(table.measures)
    lines = [f"# {table.title}", "", f"`python -m benchmarks.table {name}`, seeds {_listed(table.seeds)}."]
    lines += ["", table.note] if table.note else []
    lines += ["", f"| | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"]
    for row in table.rows:
        cells = []
        for head in heads:
            scale = 1 if head in table.plain else 100
            values = [scale * run["measures"][head] for run in runs if run["row"] == row.label]
            if math.inf in values:
                cells.append("∞")
                continue
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            paper = f" (paper: {row.paper[head]:g})" if head in row.paper else ""
            cells.append(f"{statistics.mean(values):.1f}{spread}{paper}")
        lines.append(f"| {row.label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _run(table: Table, row: Row, seed: int, digest: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        overrides = ";".join((*row.changes, f"seed={seed}"))
        summary = run_in_process(
            RunSettings(str(ROOT / "experiments" / f"{row.experiment}.yaml"), overrides, runs=folder)
        )
    return {
        "row": row.label,
        "experiment": row.experiment,
        "changes": list(row.changes),
        "seed": seed,
        "digest": digest,
        "measures": {head: round(measure(summary), 6) for head, measure in table.measures.items()},
        "seconds": summary["seconds"],
        "model_sha256": summary["model_sha256"],
        "versions": {package: version(package) for package in ("flwr", "torch", "numpy")},
        "machine": f"{platform.machine()}, CPU, one thread",
    }


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(str(seed) for seed in seeds)


def main(names: Sequence[str]) -> None:
    """Run the named tables; without a name, list them."""
    found = tables()
    for name in names:
        if name not in found:
            sys.exit(f"no table {name!r}; tables: {', '.join(sorted(found))}")
        run_table(name, found[name])
    if not names:
        for name, table in sorted(found.items()):
            print(f"{name}: {table.title}")


if __name__ == "__main__":
    main(sys.argv[1:])
