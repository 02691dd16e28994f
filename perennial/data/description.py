"""What data hold, in words and counts: for a person who has to judge them before a run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from perennial.data.labels import some_of
from perennial.data.site import SiteData
from perennial.data.table_columns import feature_ranges

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

    def warnings(self) -> Iterator[str]:
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
                yield f"column {column.name!r} is empty at {some_of(empty)}"
        if codes := [column.name for column in self.columns if column.codes]:
            yield (
                f"columns {some_of(codes)} hold at most {FEW_VALUES} different whole numbers and are read as "
                f"numbers; for codes set data.column_kinds: {{{codes[0]}: category}}"
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
        identical[name] = len(rows) - len(np.unique(site.contents_of(rows), axis=0))
    columns: list[ColumnFacts] = []
    described = next(iter(sites.values())).columns or {}
    ranges = feature_ranges(described)
    for name, kind in described.items():
        start, stop = ranges[name].start, ranges[name].stop
        # the last feature of a column says that its value is missing, or none of its categories
        missing = {site: int(sites[site].x[rows, stop - 1].sum()) for site, rows in held.items()}
        values = torch.cat([sites[site].x[rows, start] for site, rows in held.items()])
        there = torch.cat([sites[site].x[rows, stop - 1] for site, rows in held.items()]) == 0
        words = kind if isinstance(kind, str) else f"{len(kind)} categories: {some_of(kind)}"
        columns.append(ColumnFacts(name, words, missing, kind == "numeric" and _few_whole(values[there])))
    return Description(tuple(classes), samples, parts, tuple(columns), identical)


def _few_whole(values: Tensor) -> bool:
    """Whether numbers are few different whole ones, more than the two of yes and no."""
    found = values.unique()
    return 2 < len(found) <= FEW_VALUES and bool((found == found.round()).all())
