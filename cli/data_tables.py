"""What `perennial check` shows of data: tables of samples and of columns."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from perennial.data.description import Description

PARTS = ("train", "validation", "calibration", "test")
MOST_COLUMNS = 60
MOST_SITES = 40
MOST_CLASSES = 12


def print_data(console: Console, data: Description) -> None:
    """Samples by site and class, columns with their kinds and missing values, and what may surprise."""
    console.print(_samples(data))
    if data.columns:
        console.print(_columns(data))
    for warning in data.warnings():
        console.print(f"  note: {warning}", soft_wrap=True)


def _samples(data: Description) -> Table:
    table = Table(title=f"{data.rows:,} samples", title_justify="left", header_style="bold", box=SIMPLE_HEAD)
    table.add_column("site", no_wrap=True)
    used = [part for part in PARTS if part != "calibration" or any(row[part] for row in data.parts.values())]
    table.add_column(" + ".join(used), justify="right", no_wrap=True)
    several = len(data.classes) <= MOST_CLASSES
    for name in data.classes if several else ["classes held"]:
        table.add_column(Text(name), justify="right")
    for site, counts in list(data.samples.items())[:MOST_SITES]:
        parts = " + ".join(str(data.parts[site][part]) for part in used)
        held = f"{sum(count > 0 for count in counts)} of {len(counts)}"
        table.add_row(Text(site), parts, *(map(str, counts) if several else [held]))
    if (left_out := len(data.samples) - MOST_SITES) > 0:
        table.caption = f"{left_out} more sites"
    return table


def _columns(data: Description) -> Table:
    table = Table(
        title=f"{len(data.columns)} columns", title_justify="left", header_style="bold", box=SIMPLE_HEAD
    )
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
