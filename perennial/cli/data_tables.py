"""What `perennial check` shows of data: tables of samples and of columns."""

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from perennial.data.description import Description

PARTS = ("train", "validation", "calibration", "test")
MOST_COLUMNS = 60
MOST_SITES = 40
MOST_CLASSES = 40
BETWEEN = 2
"""Blanks between two columns of a table."""


def print_data(console: Console, data: Description) -> None:
    """Samples by site and class, columns with their kinds and missing values, and what may surprise."""
    for table in _samples(data, console.width):
        console.print(table)
    if data.columns:
        console.print(_columns(data))
    for warning in data.warnings():
        console.print(f"  note: {warning}", soft_wrap=True)


def _samples(data: Description, width: int) -> list[Table]:
    """Sites in rows and classes in columns; classes in rows if the terminal is too narrow for that."""
    used = [part for part in PARTS if part != "calibration" or any(row[part] for row in data.parts.values())]
    sites = list(data.samples)[:MOST_SITES]
    parts = [" + ".join(str(data.parts[site][part]) for part in used) for site in sites]
    taken = _widest([*sites, "site"]) + _widest(parts) + 2 * BETWEEN
    counts = [[str(count) for count in data.samples[site]] for site in sites]
    columns = [
        _widest([name, *held]) for name, held in zip(data.classes, zip(*counts, strict=True), strict=True)
    ]
    together = taken + sum(columns) + BETWEEN * len(columns) <= width
    table = _table(f"{data.rows:,} samples")
    table.add_column("site", no_wrap=True)
    table.add_column(" + ".join(used), justify="right", min_width=_widest(parts))
    for name in data.classes if together else ["classes held"]:
        table.add_column(Text(name), justify="right", no_wrap=True)
    for site, divided, held in zip(sites, parts, counts, strict=True):
        some = f"{sum(count != '0' for count in held)} of {len(held)}"
        table.add_row(Text(site), divided, *(held if together else [some]))
    if (left_out := len(data.samples) - MOST_SITES) > 0:
        table.caption = f"{left_out} more sites"
    return [table] if together else [table, _by_class(data, width)]


def _by_class(data: Description, width: int) -> Table:
    """Classes in rows: their samples, and those of each site where there is room for the sites."""
    table = _table(f"{len(data.classes)} classes")
    table.add_column("class", overflow="fold")
    table.add_column("samples", justify="right", no_wrap=True)
    sites = list(data.samples)
    names = _widest(data.classes[:MOST_CLASSES]) + len("samples") + 2 * BETWEEN
    each = names + sum(max(len(site), 5) + BETWEEN for site in sites) <= width
    for site in sites if each else ["sites that hold it"]:
        table.add_column(Text(site), justify="right", no_wrap=True)
    for label, name in list(enumerate(data.classes))[:MOST_CLASSES]:
        held = [data.samples[site][label] for site in sites]
        some = f"{sum(count > 0 for count in held)} of {len(sites)}"
        table.add_row(Text(name), str(sum(held)), *(map(str, held) if each else [some]))
    if (left_out := len(data.classes) - MOST_CLASSES) > 0:
        table.caption = f"{left_out} more classes"
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD)


def _widest(texts: Iterable[str]) -> int:
    return max(map(len, texts), default=0)


def _columns(data: Description) -> Table:
    table = _table(f"{len(data.columns)} columns")
    table.add_column("column")
    table.add_column("kind")
    table.add_column("missing", justify="right")
    several = len(data.samples) > 1
    if several:
        table.add_column("most at")
    for column in data.columns[:MOST_COLUMNS]:
        missing = sum(column.missing.values())
        share = f"{missing} ({100 * missing / max(data.rows, 1):.0f} %)" if missing else "0"
        site = max(column.missing, key=lambda name: column.missing[name] / max(sum(data.samples[name]), 1))
        where = (
            f"{site} ({100 * column.missing[site] / max(sum(data.samples[site]), 1):.0f} %)"
            if missing
            else ""
        )
        table.add_row(Text(column.name), Text(column.kind), share, *([Text(where)] if several else []))
    if len(data.columns) > MOST_COLUMNS:
        table.caption = f"{len(data.columns) - MOST_COLUMNS} more columns"
    return table
