"""What became of claims that their tables' own seeds left undecided: more seeds, or taken off.

`results/power.json` holds the decisions, made once from the seeds that the tables had then. A claim that got
new seeds (1000, 1001, ...) is judged by these alone, so that looking twice makes nothing surer; their runs
are lines of `results/deciding.jsonl`. A claim that was taken off goes on counting in the correction.
"""

import json
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.grid import read_results, settings_hash
from benchmarks.paper_claims import Claim
from benchmarks.table import RESULTS, Table

MOST_SEEDS, MOST_MINUTES = 40, 2.5
"""Of one claim: more seeds than these, or more minutes of one core for both rows, were not paid for."""
FIRST = 1000
DECISIONS, RECORD = "power.json", "deciding.jsonl"


@dataclass(frozen=True)
class Estimate:
    """What it would have taken to decide a claim.

    Attributes:
        word: The claim's verdict by its table's own seeds.
        mean: Of the paired differences, in points.
        deviation: Of the same, over so many seeds.
        needed: New seeds that would decide it; infinite where the mean lies too near the margin.
        minutes: Of one core for these.
    """

    table: str
    claim: str
    word: str
    mean: float
    deviation: float
    seeds: int
    needed: float
    minutes: float

    @property
    def decision(self) -> str:
        """One of `judged`, `more seeds` and `taken off`."""
        if self.word != "undecided":
            return "judged"
        return "more seeds" if self.needed <= MOST_SEEDS and self.minutes <= MOST_MINUTES else "taken off"


def read_decisions(results: Path = RESULTS) -> dict[tuple[str, str], Estimate]:
    """(table, claim) -> the estimate that decided what became of it."""
    path = results / DECISIONS
    lines = json.loads(path.read_text()) if path.exists() else []
    found = [
        Estimate(**{**line, "needed": inf if line["needed"] is None else line["needed"]}) for line in lines
    ]
    return {(each.table, each.claim): each for each in found}


def read_deciding_runs(
    table: Table, claim: Claim, decided: Estimate, results: Path = RESULTS
) -> list[dict[str, Any]]:
    """Those of a claim's new runs that are there, as its rows are now."""
    known = {run["settings"]: run for run in read_results(results / RECORD)}
    rows = [row for row in table.rows if row.label in (claim.better, claim.worse)]
    wanted = [
        (row.label, seed, settings_hash(row.load(seed), row.attack))
        for seed in range(FIRST, FIRST + int(decided.needed))
        for row in rows
    ]
    return [{**known[key], "row": row, "seed": seed} for row, seed, key in wanted if key in known]
