"""A table's committed figures as Markdown."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from perennial.benchmarks.paper_claims import judge
from perennial.benchmarks.table import OLD_REVISIONS, Row, Table

Runs = Sequence[Mapping[str, Any]]


def markdown(name: str, table: Table, runs: Runs) -> str:
    """The page of one table: title, how to run it, note, which runs are missing, figures, claims."""
    lines = [f"# {table.title}", "", f"`perennial bench {name}`, seeds {listed(table.seeds)}."]
    lines += ["", table.note] if table.note else []
    lines += ["", old] if (old := age(runs)) else []
    lines += ["", gap] if (gap := missing(table, runs)) else []
    lines += ["", *figures(table, runs), *claims(table, runs)] if runs else []
    return "\n".join(lines) + "\n"


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
    """Mean and standard deviation (ddof 1) over seeds, in per cent, the paper's figure beside ours."""
    heads = list(table.measures)
    lines = [f"| | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"]
    return lines + [
        f"| {row.label} | {' | '.join(cell(table, row, head, runs) for head in heads)} |"
        for row in table.rows
    ]


def cell(table: Table, row: Row, head: str, runs: Runs) -> str:
    """One measure of one row; a dash where nothing has been run or measured, a sign for infinity."""
    scale = 1 if head in table.plain else 100
    values = [scale * run["measures"][head] for run in runs if run["row"] == row.label]
    values = [value for value in values if not math.isnan(value)]
    if not values:
        return "-"
    if math.inf in values:
        return "∞"
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    paper = f" (paper: {row.paper[head]:g})" if head in row.paper else ""
    return f"{statistics.mean(values):.1f}{spread}{paper}"


def claims(table: Table, runs: Runs) -> list[str]:
    """Each claim, its verdict and the difference behind it."""
    if not table.claims:
        return []
    lines = ["", "| claim | here | difference, points |", "| --- | --- | --- |"]
    for claim in table.claims:
        verdict = judge(claim, runs)
        value = f"{verdict.difference:+.1f} ± {verdict.error:.1f}" if verdict.seeds > 1 else "-"
        lines.append(f"| {claim.text} | {verdict.word} | {value} |")
    return lines


def listed(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values)
