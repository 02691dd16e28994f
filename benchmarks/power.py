"""How many seeds would decide a claim that its table leaves undecided, and which claims get them.

`python -m benchmarks --power [TABLE...]` prints the estimate; nothing is run.
`python -m benchmarks.power decide` wrote results/power.json once, by the rule below, from the seeds
that the tables had then: a claim gets that many new seeds (1000, 1001, ...) and is judged by them alone, so
that looking twice makes nothing surer; or it is taken off. `python -m benchmarks.power run` makes
what is missing of the new seeds, line by line in results/deciding.jsonl.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.environment import machine, versions
from benchmarks.grid import newest, read_results, run_job, settings_hash
from benchmarks.intervals import LEVEL
from benchmarks.paper_claims import Claim, Runs, judge
from benchmarks.table import RESULTS, Table, tables

POWER = 0.8
MOST_SEEDS, MOST_MINUTES = 40, 2.5
"""Of one claim: more seeds than these, or more minutes of one core for both rows, are not paid for."""
FIRST = 1000
DECISIONS, RECORD = "power.json", "deciding.jsonl"


@dataclass(frozen=True)
class Estimate:
    """Of one claim.

    word: its verdict. mean, deviation: of the paired differences, in points, over so many seeds.
    needed: new seeds that would decide it; infinite where the mean lies too near the margin.
    minutes: of one core for these.
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
        """judged, more seeds, or taken off."""
        if self.word != "undecided":
            return "judged"
        return "more seeds" if self.needed <= MOST_SEEDS and self.minutes <= MOST_MINUTES else "taken off"


def seeds_needed(mean: float, deviation: float, margin: float, tests: int) -> float:
    """The fewest seeds whose t-test at level (1 - LEVEL) / tests finds such a mean with POWER."""
    from scipy.special import nctdtr, stdtrit

    distance = abs(mean - margin)
    for seeds in range(3, 10 * MOST_SEEDS) if distance else ():
        quantile = float(stdtrit(seeds - 1, 1 - (1 - LEVEL) / tests / 2))
        shift = distance / max(deviation, 1e-9) * seeds**0.5
        if 1 - float(nctdtr(seeds - 1, shift, quantile)) >= POWER:
            return seeds
    return inf


def estimates(named: Mapping[str, Table], results: Path = RESULTS) -> list[Estimate]:
    """One for each claim of the tables by the tables' own seeds, corrected for the number of these claims."""
    every = [
        (name, claim, runs)
        for name, table in named.items()
        for runs in [newest(table, results / f"{name}.jsonl") if table.claims else []]
        for claim in table.claims
    ]
    verdicts = judge([(claim, runs) for _, claim, runs in every])
    found = []
    for (name, claim, runs), verdict in zip(every, verdicts, strict=True):
        differences = claim.differences(runs)
        if len(differences) > 1:
            mean, deviation = statistics.mean(differences), statistics.stdev(differences)
            needed = seeds_needed(mean, deviation, claim.margin, len(every))
            minutes = needed * _seconds(claim, runs) / 60
            facts = (round(mean, 2), round(deviation, 2), len(differences), needed, round(minutes, 1))
            found.append(Estimate(name, claim.text, verdict.word, *facts))
    return found


def _seconds(claim: Claim, runs: Runs) -> float:
    """Of one seed of both rows: the fastest of each."""
    return sum(
        min(run["seconds"] for run in runs if run["row"] == row) for row in (claim.better, claim.worse)
    )


def page(found: Sequence[Estimate]) -> str:
    """Every claim that is undecided by its table's own seeds, cheapest first."""
    open_ = sorted((each for each in found if each.word == "undecided"), key=lambda each: each.minutes)
    paid = sum(each.decision == "more seeds" for each in open_)
    lines = [
        "# Which seeds would decide what is undecided",
        "",
        f"By their tables' own seeds {len(open_)} of {len(found)} claims are undecided. Seeds that would "
        f"decide: the fewest of which {POWER:.0%} of all repetitions would find a mean that is as far from "
        f"the claim's margin, at the level of so many claims. {paid} claims get them: at most {MOST_SEEDS} "
        f"seeds and {MOST_MINUTES:g} minutes of one core. These are judged by the new seeds alone. The "
        "others are taken off the claims and go on counting in the correction of those that are left.",
        "",
        "| table | claim | mean, points | deviation | seeds | seeds that decide | minutes | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {each.table} | {each.claim} | {each.mean:+.1f} | {each.deviation:.1f} | {each.seeds} | "
        f"{each.needed:g} | {each.minutes:.1f} | {each.decision} |"
        for each in open_
    ]
    return "\n".join(lines) + "\n"


def decisions(results: Path = RESULTS) -> dict[tuple[str, str], Estimate]:
    """(table, claim) -> the estimate that decided what becomes of it."""
    path = results / DECISIONS
    lines = json.loads(path.read_text()) if path.exists() else []
    found = [
        Estimate(**{**line, "needed": inf if line["needed"] is None else line["needed"]}) for line in lines
    ]
    return {(each.table, each.claim): each for each in found}


def decide(results: Path = RESULTS) -> None:
    """Write the decisions."""
    lines = [
        {**asdict(each), **({"needed": None, "minutes": -1.0} if each.needed == inf else {})}
        for each in estimates(dict(sorted(tables().items())), results)
    ]
    (results / DECISIONS).write_text(json.dumps(lines, indent=0) + "\n")


def new_seeds(table: Table, claim: Claim, decided: Estimate) -> list[tuple[str, int, str]]:
    """(row, seed, settings) of every run that decides a claim."""
    rows = [row for row in table.rows if row.label in (claim.better, claim.worse)]
    return [
        (row.label, seed, settings_hash(row.load(seed), row.attack))
        for seed in range(FIRST, FIRST + int(decided.needed))
        for row in rows
    ]


def deciding_runs(
    table: Table, claim: Claim, decided: Estimate, results: Path = RESULTS
) -> list[dict[str, Any]]:
    """Those of a claim's new runs that are there, as its rows are now."""
    known = {run["settings"]: run for run in read_results(results / RECORD)}
    wanted = new_seeds(table, claim, decided)
    return [{**known[key], "row": row, "seed": seed} for row, seed, key in wanted if key in known]


def run(results: Path = RESULTS) -> None:
    """Make what is missing, the cheapest claim first."""
    path, every = results / RECORD, tables()
    paid = [
        each for each in decisions(results).values() if each.decision == "more seeds" and each.table in every
    ]
    for each in sorted(paid, key=lambda each: each.minutes):
        table = every[each.table]
        claim = next(claim for claim in table.claims if claim.text == each.claim)
        rows = {row.label: row for row in table.rows}
        for label, seed, settings in new_seeds(table, claim, each):
            if settings in {found["settings"] for found in read_results(path)}:
                continue
            ran = run_job(rows[label].file, rows[label], seed, "cpu")
            line = {
                **{"table": each.table, "row": label, "seed": seed, "settings": settings},
                **{"measures": table.measured(ran.summary), "seconds": ran.summary["seconds"]},
                **{"versions": versions(), "machine": machine()},
            }
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    {"decide": decide, "run": run}[sys.argv[1]](*map(Path, sys.argv[2:]))
