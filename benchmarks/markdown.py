"""A table's committed figures as Markdown."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.chart import main_measure
from benchmarks.controls import LABELS, SIMPLE, Measured, compared, stands_for
from benchmarks.intervals import LEAST_SEEDS, half_width, t_interval
from benchmarks.paper_claims import Runs
from benchmarks.table import OLD_REVISIONS, Row, Table


def markdown(name: str, table: Table, runs: Runs, controls: Measured) -> str:
    """The page of one table: title, how to run it, note, which runs are missing, figures, controls.

    Verdicts on claims are on the page of all tables, which corrects them for their number.
    """
    lines = [f"# {table.title}", "", f"`python -m benchmarks {name}`, seeds {listed(table.seeds)}."]
    lines += ["", table.note] if table.note else []
    lines += ["", old] if (old := age(runs)) else []
    lines += ["", gap] if (gap := missing(table, runs)) else []
    controls = {} if age(runs) else controls  # old runs held out other samples
    if runs:
        lines += ["", *not_above(table, runs, controls), *figures(table, runs), *by_task(table, runs)]
        lines += beside(table, controls)
        lines += differences(table, runs)
        lines += ["", f"![{main_measure(table)}: rows and seeds](../../docs/results/{name}.svg)"]
        machines, packages = (sorted({_said(run, key) for run in runs}) for key in ("machine", "versions"))
        minutes = sum(run["seconds"] for run in runs) / 60
        lines += ["", f"{minutes:.0f} minutes of runs; {'; '.join(machines)}; {'; '.join(packages)}."]
    return "\n".join(lines) + "\n"


def _said(run: Mapping[str, Any], key: str) -> str:
    found = run[key]
    return found if isinstance(found, str) else ", ".join(f"{name} {of}" for name, of in found.items())


def missing(table: Table, runs: Runs) -> str:
    """A sentence on a table that is not run, or not whole, and why; '' for a whole one."""
    if len(runs) == table.planned:
        return ""
    state = f"{len(runs)} of {table.planned} runs" if runs else f"not run (0 of {table.planned} runs)"
    return f"**{state[0].upper()}{state[1:]}.** {table.pending}".rstrip()


def age(runs: Runs) -> str:
    """A sentence when runs are of an old revision of the program; '' when they are of the present one."""
    why = [OLD_REVISIONS[revision] for run in runs if (revision := run.get("revision", 1)) in OLD_REVISIONS]
    return f"**These figures are old:** they were {why[0]}. They will be made again." if why else ""


def figures(table: Table, runs: Runs) -> list[str]:
    """Mean over seeds in per cent and half its 95 % t-interval, the paper's figure beside ours."""
    heads = list(table.measures)
    lines = [f"| | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"]
    return lines + [
        f"| {row.label} | {' | '.join(cell(table, row, head, runs) for head in heads)} |"
        for row in table.rows
    ]


def by_task(table: Table, runs: Runs) -> list[str]:
    """Accuracy on all known classes after each task, which alone shows a fall in mid-run; what lacks it."""
    lines, lacking = list[str](), list[str]()
    for row in table.rows:
        found = [run for run in runs if run["row"] == row.label]
        curves = [run["by_task"] for run in found if len(run.get("by_task", ())) > 1]
        if curves:
            means = [f"{100 * statistics.mean(after):.1f}" for after in zip(*curves, strict=True)]
            lines.append(f"| {row.label} | {len(curves)} | {' '.join(means)} |")
        if any("by_task" not in run for run in found) and row.load(found[0]["seed"]).tasks.count != 1:
            lacking.append(row.label + (", its other seeds" if curves else ""))
    # the record is of the server's samples, which sites' own class means do not judge
    judge = ", head" if any(name.endswith(", head") for name in table.measures) else ""
    head = ["", f"| | seeds | accuracy after each task{judge} |", "| --- | --- | --- |"] if lines else []
    whose = "every row" if len(lacking) == len(table.rows) and not lines else "; ".join(lacking)
    old = f"No accuracy after each task, because the runs are older than its record: {whose}."
    return [*head, *lines, *(["", old] if lacking else [])]


def cell(table: Table, row: Row, head: str, runs: Runs) -> str:
    """One measure of one row; a dash where nothing has been run or measured, a sign for infinity."""
    scale = 1 if head in table.plain else 100
    values = [scale * run["measures"][head] for run in runs if run["row"] == row.label]
    values = [value for value in values if not math.isnan(value)]
    if not values:
        return "-"
    if math.inf in values:
        return "∞"
    paper = f" (paper: {row.paper[head]:g})" if head in row.paper else ""
    return f"{_mean(values)}{paper}"


def _mean(values: Sequence[float]) -> str:
    spread = f" ± {half_width(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def beside(table: Table, controls: Measured) -> list[str]:
    """The controls of each kind of data in a table, as a table of the measures that both have."""
    heads = compared(table)
    lines: list[str] = []
    for row, found in controls.items():
        whose = f" on the data of “{row}”" if len(controls) > 1 else ""
        lines += ["", f"| control{whose} | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"]
        for label in LABELS:
            if label in found:
                cells = [_control(found[label], measure) for measure in heads.values()]
                lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def _control(by_seed: Mapping[int, Mapping[str, float]], measure: str) -> str:
    values = [100 * measures[measure] for measures in by_seed.values() if measure in measures]
    return _mean(values) if values else "-"


def not_above(table: Table, runs: Runs, controls: Measured) -> list[str]:
    """A sentence for each kind of data that names the rows which do not beat its simple controls.

    A row beats a control when the 95 % t-interval of the paired difference is above 0.
    """
    heads = compared(table)
    if not controls or not heads:
        return []
    head, measure = next(iter(heads.items()))
    whose = stands_for(table)
    lines: list[str] = []
    for standing, found in controls.items():
        simple = {
            label: {seed: measures[measure] for seed, measures in found[label].items() if measure in measures}
            for label in SIMPLE
            if label in found
        }
        means = {label: statistics.mean(shares.values()) for label, shares in simple.items() if shares}
        if not means:
            continue
        best = max(means, key=lambda label: means[label])
        rows = [row for row in table.rows if whose[row.label] == standing]
        behind = [row.label for row in rows if not _beats(row, head, runs, simple[best])]
        if behind:
            share = f"{100 * means[best]:.1f}"
            lines += [f"**Not above the best simple control ({best}, {share}):** {'; '.join(behind)}.", ""]
    return lines


def _beats(row: Row, head: str, runs: Runs, control: Mapping[int, float]) -> bool:
    """Or cannot be told, because fewer than five seeds have both."""
    differences = [
        run["measures"][head] - control[run["seed"]]
        for run in runs
        if run["row"] == row.label and run["seed"] in control and not math.isnan(run["measures"][head])
    ]
    return len(differences) < LEAST_SEEDS or t_interval(differences).low > 0


def differences(table: Table, runs: Runs) -> list[str]:
    """What each claim compares: the paired difference with its own 95 % t-interval, without a verdict."""
    if not table.claims:
        return []
    lines = ["", "| claim | difference, points |", "| --- | --- |"]
    for claim in table.claims:
        found = claim.differences(runs)
        lines.append(f"| {claim.text} | {t_interval(found) if len(found) > 1 else '-'} |")
    return [
        *lines,
        "",
        "Verdicts, which count how many claims are tested, are in [README.md](README.md).",
    ]


def listed(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values)
