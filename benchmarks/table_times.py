"""How long the tables of CPU size took, from the seconds that each committed run and its controls say.

`python -m perennial.benchmarks.table_times` writes benchmarks/results/table_times.md. Nothing is run. A run's
seconds are of the clock on the wall, one process for each run, whatever else the machine had to do: a table
takes at most as long on a quiet one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perennial.benchmarks.controls import known, protocols
from perennial.benchmarks.grid import finished
from perennial.benchmarks.table import RESULTS, Table, tables

PAGE = RESULTS / "table_times.md"
EACH, ALL, CORES = 15, 180, 2
"""Minutes that a table, and all together on two cores, may take."""
ATTACKS = frozenset({"robust_digits", "robust_colluders_digits", "robust_ham10000"})
"""Tables of attacks, which count apart."""


@dataclass(frozen=True)
class Time:
    """Minutes of one core that a table took. runs: how many of the planned ones are there."""

    runs: int
    planned: int
    minutes: float
    controls: float

    @property
    def whole(self) -> float:
        """Of runs and controls, were the missing runs as long as the others."""
        return self.minutes * self.planned / max(self.runs, 1) + self.controls


def times(found: Mapping[str, Table]) -> dict[str, Time]:
    """Table of CPU size -> what it took. A protocol that several tables share counts at the first alone."""
    measured, counted = known(), set[str]()
    taken: dict[str, Time] = {}
    for name, table in sorted(found.items()):
        if table.scale != "cpu":
            continue
        runs = finished(table, RESULTS / f"{name}.jsonl").values()
        keys = {protocol.key for seed in table.seeds for protocol in protocols(table, seed)} - counted
        counted |= keys
        controls = sum(measured[key]["seconds"] for key in keys & measured.keys())
        seconds = sum(run["seconds"] for run in runs)
        taken[name] = Time(len(runs), table.planned, seconds / 60, controls / 60)
    return taken


def page(taken: Mapping[str, Time]) -> str:
    """The figures as Markdown, longest first."""
    plain = {name: time for name, time in taken.items() if name not in ATTACKS}
    total = sum(time.whole for time in plain.values())
    long = [name for name, time in plain.items() if time.whole / CORES > EACH]
    lines = [
        "# How long the tables of CPU size take",
        "",
        "`python -m perennial.benchmarks.table_times`, from the seconds in the result files: of the clock on "
        "the wall, on a machine with two cores that had other work too, so no table takes longer than "
        "this on a quiet one. Where runs are missing, they are taken to be as long as the others.",
        "",
        f"All without the attacks: {total:.0f} minutes of one core, {total / CORES:.0f} on {CORES}; "
        f"{_verdict(total / CORES <= ALL)} the {ALL} that they may take.",
        f"Tables above {EACH} minutes on {CORES} cores: {', '.join(sorted(long)) or 'none'}.",
        "",
        "| table | runs | minutes of runs | of controls |",
        "| --- | --- | --- | --- |",
    ]
    order: Sequence[tuple[str, Time]] = sorted(taken.items(), key=lambda item: -item[1].whole)
    lines += [
        f"| {name}{' (attacks)' if name in ATTACKS else ''} | {time.runs} of {time.planned} | "
        f"{time.minutes:.1f} | {time.controls:.1f} |"
        for name, time in order
    ]
    return "\n".join(lines) + "\n"


def _verdict(within: bool) -> str:
    return "within" if within else "above"


if __name__ == "__main__":
    PAGE.write_text(page(times(tables())))
    print(PAGE)
