"""What `perennial check` shows of data: tables of samples and of columns.

A description is of counts and kinds, for a person who has to judge the data before a run."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from perennial.data.labels import format_names
from perennial.data.site import SiteData
from perennial.data.table_columns import locate_features

FEW_VALUES = 10
"""A column of so few different whole numbers may hold codes."""


@dataclass(frozen=True)
class ColumnFacts:
    """One column. kind: in words. missing: rows by site. codes: whether its numbers may be codes."""

    name: str
    kind: str
    missing: dict[str, int]
    codes: bool


@dataclass(frozen=True)
class Description:
    """Counts for one site or several.

    samples: site -> samples of each class, in all parts together. parts: site -> part -> samples. columns: of
    a table. identical: site -> rows whose content an earlier row of the site has too, without the label.
    """

    classes: tuple[str, ...]
    samples: dict[str, list[int]]
    parts: dict[str, dict[str, int]]
    columns: tuple[ColumnFacts, ...]
    identical: Mapping[str, int] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Number of samples at all sites."""
        return sum(map(sum, self.samples.values()))

    def list_warnings(self) -> Iterator[str]:
        """Yield warnings: sites with one class, columns empty at a site, numbers that may be codes."""
        if len(self.classes) == 1:
            yield f"{self.classes[0]!r} is the only class: a model of it tells nothing apart"
        for site, counts in self.samples.items():
            held = [name for name, count in zip(self.classes, counts, strict=True) if count]
            if len(held) == 1 < len(self.classes):
                yield f"site {site!r} holds one class alone, {held[0]!r}"
        for site, count in self.identical.items():
            if count:
                yield (
                    f"site {site!r}: {count} of {sum(self.samples[site])} rows are identical to an earlier "
                    "row; each counts as a record of its own"
                )
        for column in self.columns:
            empty = [site for site, count in column.missing.items() if count == sum(self.samples[site])]
            if empty:
                yield f"column {column.name!r} is empty at {format_names(empty)}"
        if codes := [column.name for column in self.columns if column.codes]:
            yield (
                f"columns {format_names(codes)} hold at most {FEW_VALUES} different whole numbers "
                f"and are read as numbers; for codes set data.column_kinds: {{{codes[0]}: category}}"
            )


def describe_data(sites: Mapping[str, SiteData], classes: Sequence[str]) -> Description:
    """Describe the data of these sites by counts and kinds of columns; no value identifies anybody."""
    samples, parts, held, identical = {}, {}, {}, {}
    for name, site in sites.items():
        divided = {"train": site.train, "validation": site.validation, "calibration": site.calibration}
        divided["test"] = site.test
        rows = torch.cat([*divided.values()])
        samples[name] = torch.bincount(site.y[rows], minlength=len(classes)).tolist()
        parts[name] = {part: len(indices) for part, indices in divided.items()}
        held[name] = rows
        identical[name] = len(rows) - len(np.unique(site.hash_contents(rows), axis=0))
    columns: list[ColumnFacts] = []
    described = next(iter(sites.values())).columns or {}
    ranges = locate_features(described)
    for name, kind in described.items():
        start, stop = ranges[name].start, ranges[name].stop
        # the last feature of a column says that its value is missing, or none of its categories
        missing = {site: int(sites[site].x[rows, stop - 1].sum()) for site, rows in held.items()}
        values = torch.cat([sites[site].x[rows, start] for site, rows in held.items()])
        there = torch.cat([sites[site].x[rows, stop - 1] for site, rows in held.items()]) == 0
        words = kind if isinstance(kind, str) else f"{len(kind)} categories: {format_names(kind)}"
        columns.append(ColumnFacts(name, words, missing, kind == "numeric" and _has_few_whole(values[there])))
    return Description(tuple(classes), samples, parts, tuple(columns), identical)


def _has_few_whole(values: Tensor) -> bool:
    """Whether numbers are few different whole ones, more than the two of yes and no."""
    found = values.unique()
    return 2 < len(found) <= FEW_VALUES and bool((found == found.round()).all())


PARTS = ("train", "validation", "calibration", "test")
MOST_COLUMNS = 60
MOST_SITES = 40
MOST_CLASSES = 40
BETWEEN = 2
"""Blanks between two columns of a table."""


def print_data(console: Console, data: Description) -> None:
    """Samples by site and class, columns with their kinds and missing values, and what may surprise."""
    for table in _build_sample_tables(data, console.width):
        console.print(table, soft_wrap=False)
    if data.columns:
        console.print(_build_column_table(data), soft_wrap=False)
    for warning in data.list_warnings():
        console.print(f"  note: {warning}", soft_wrap=True)


def _build_sample_tables(data: Description, width: int) -> list[Table]:
    """Sites in rows and classes in columns; classes in rows if the terminal is too narrow for that."""
    used = [part for part in PARTS if part != "calibration" or any(row[part] for row in data.parts.values())]
    sites = list(data.samples)[:MOST_SITES]
    parts = [" + ".join(str(data.parts[site][part]) for part in used) for site in sites]
    taken = _measure_widest([*sites, "site"]) + _measure_widest(parts) + 2 * BETWEEN
    counts = [[str(count) for count in data.samples[site]] for site in sites]
    columns = [
        _measure_widest([name, *held])
        for name, held in zip(data.classes, zip(*counts, strict=True), strict=True)
    ]
    together = taken + sum(columns) + BETWEEN * len(columns) <= width
    table = _make_table(f"{data.rows:,} samples")
    table.add_column("site", no_wrap=True)
    table.add_column(" + ".join(used), justify="right", min_width=_measure_widest(parts))
    for name in data.classes if together else ["classes held"]:
        table.add_column(Text(name), justify="right", no_wrap=True)
    for site, divided, held in zip(sites, parts, counts, strict=True):
        some = f"{sum(count != '0' for count in held)} of {len(held)}"
        table.add_row(Text(site), divided, *(held if together else [some]))
    if (left_out := len(data.samples) - MOST_SITES) > 0:
        table.caption = f"{left_out} more sites"
    return [table] if together else [table, _build_class_table(data, width)]


def _build_class_table(data: Description, width: int) -> Table:
    """Classes in rows: their samples, and those of each site where there is room for the sites."""
    table = _make_table(f"{len(data.classes)} classes")
    table.add_column("class", overflow="fold")
    table.add_column("samples", justify="right", no_wrap=True)
    sites = list(data.samples)
    names = _measure_widest(data.classes[:MOST_CLASSES]) + len("samples") + 2 * BETWEEN
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


def _make_table(title: str) -> Table:
    return Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD)


def _measure_widest(texts: Iterable[str]) -> int:
    return max(map(len, texts), default=0)


def _build_column_table(data: Description) -> Table:
    table = _make_table(f"{len(data.columns)} columns")
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
