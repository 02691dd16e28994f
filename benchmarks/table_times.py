"""How long the tables of CPU size took, from the seconds that each committed run and its controls say.

`python -m benchmarks.table_times` writes benchmarks/results/table_times.md. Nothing is run. A run's
seconds are of the clock on the wall, one process for each run, whatever else the machine had to do: a table
takes at most as long on a quiet one. How long it would take there is estimated: the seeds of a row, and those
of its controls, do the same work, so each is taken to need what the fastest of them did.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.controls import known, protocols
from benchmarks.grid import finished
from benchmarks.table import RESULTS, Table, tables

PAGE = RESULTS / "table_times.md"
EACH, ALL, CORES = 15, 180, 2
"""Minutes that a table, and all together on two cores, may take."""
ATTACKS = "robust_"
"""How the names of tables of attacks begin, which count apart."""


@dataclass(frozen=True)
class Time:
    """Minutes of one core that a table took.

    runs: how many of the planned ones are there. quiet: of runs and controls, were each as short as the
    fastest seed of its row.
    """

    runs: int
    planned: int
    minutes: float
    quiet: float
    controls: float

    @property
    def whole(self) -> float:
        """Of runs and controls, were the missing runs as long as the others."""
        return self.minutes * self.planned / max(self.runs, 1) + self.controls

    @property
    def whole_quiet(self) -> float:
        """The same at the fastest seeds."""
        return self.quiet * self.planned / max(self.runs, 1)


def times(found: Mapping[str, Table]) -> dict[str, Time]:
    """Table of CPU size -> what it took. A protocol that several tables share counts at the first alone."""
    measured, counted = known(), set[str]()
    taken: dict[str, Time] = {}
    for name, table in sorted(found.items()):
        if table.scale != "cpu":
            continue
        rows: dict[str, list[float]] = {}
        for run in finished(table, RESULTS / f"{name}.jsonl").values():
            rows.setdefault(run["row"], []).append(run["seconds"])
        keys = {protocol.key for seed in table.seeds for protocol in protocols(table, seed)} - counted
        counted |= keys
        controlled: dict[tuple[str, str], list[float]] = {}
        for key in keys & measured.keys():
            control = measured[key]
            controlled.setdefault((control["experiment"], control["row"]), []).append(control["seconds"])
        runs, seconds = sum(map(len, rows.values())), sum(map(sum, rows.values()))
        controls = sum(map(sum, controlled.values()))
        quiet = sum(min(row) * len(row) for row in (*rows.values(), *controlled.values()))
        taken[name] = Time(runs, table.planned, seconds / 60, quiet / 60, controls / 60)
    return taken


def page(taken: Mapping[str, Time]) -> str:
    """The figures as Markdown, longest first."""
    plain = {name: time for name, time in taken.items() if not name.startswith(ATTACKS)}
    total = sum(time.whole for time in plain.values())
    quiet = sum(time.whole_quiet for time in plain.values())
    long = [name for name, time in plain.items() if time.whole_quiet / CORES > EACH]
    lines = [
        "# How long the tables of CPU size take",
        "",
        "`python -m benchmarks.table_times`, from the seconds in the result files: of the clock on "
        "the wall, on a machine with two cores that had other work too, so no table takes longer than "
        "this on a quiet one. The seeds of a row, and those of its controls, do the same work; so a quiet "
        "machine is taken to need for each what the fastest of them took. Missing runs are taken to be as "
        "long as the others.",
        "",
        f"All without the attacks: {total:.0f} minutes of one core as recorded, {total / CORES:.0f} on "
        f"{CORES} cores. At the fastest seeds: {quiet / CORES:.0f} on {CORES}, "
        f"{_verdict(quiet / CORES <= ALL)} the {ALL} that they may take.",
        f"Tables above {EACH} minutes on {CORES} cores at the fastest seeds: "
        f"{', '.join(sorted(long)) or 'none'}.",
        "",
        "| table | runs | minutes of runs | of controls | all at the fastest seeds |",
        "| --- | --- | --- | --- | --- |",
    ]
    order: Sequence[tuple[str, Time]] = sorted(taken.items(), key=lambda item: -item[1].whole)
    lines += [
        f"| {name}{' (attacks)' if name.startswith(ATTACKS) else ''} | {time.runs} of {time.planned} | "
        f"{time.minutes:.1f} | {time.controls:.1f} | {time.quiet:.1f} |"
        for name, time in order
    ]
    return "\n".join(lines) + "\n"


def _verdict(within: bool) -> str:
    return "within" if within else "above"


if __name__ == "__main__":
    PAGE.write_text(page(times(tables())))
    print(PAGE)
