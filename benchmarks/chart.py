"""A table's main measure as a picture: every seed a dot, every row its mean and 95 % t-interval.

SVG, the same bytes for the same results, so that a test can hold it against them."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from benchmarks.intervals import half_width
from benchmarks.table import Row, Table

WIDTH, LABELS, RIGHT = 860, 400, 30
HEAD, ROW, FOOT = 40, 28, 34
LONGEST = 58
"""Characters of a label; what is left out stands in the table."""
STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1000)
INK, SOFT, GRID, DOT, MEAN = "#1c2b26", "#5c6b66", "#e3e6e4", "#0072b2", "#14513d"


def main_measure(table: Table) -> str:
    """The first one that is a share, or else the first."""
    return next((head for head in table.measures if head not in table.plain), next(iter(table.measures)))


def chart(table: Table, runs: Sequence[Mapping[str, Any]]) -> str:
    """The picture; shares in per cent. Rows with a value that is not finite are left out."""
    head = main_measure(table)
    scale = 1 if head in table.plain else 100
    values = {
        row: [scale * run["measures"][head] for run in runs if run["row"] == row.label] for row in table.rows
    }
    shown = [(row, found) for row, found in values.items() if found and all(map(math.isfinite, found))]
    places = [place for _, found in shown for place in (*found, *_whisker(found))]
    low, high, step = _axis(places or [0.0])

    def across(value: float) -> float:
        return LABELS + (value - low) / (high - low) * (WIDTH - LABELS - RIGHT)

    bottom = HEAD + ROW * len(shown)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{bottom + FOOT}" '
        f'viewBox="0 0 {WIDTH} {bottom + FOOT}" font-family="Inter, Helvetica, Arial, sans-serif" '
        f'font-size="13" role="img">',
        f"<title>{escape(table.title)}: {escape(head)}</title>",
        f'<rect width="{WIDTH}" height="{bottom + FOOT}" rx="8" fill="#ffffff"/>',
        f'<text x="{LABELS}" y="24" fill="{SOFT}">{escape(head)}{"" if scale == 1 else ", %"}</text>',
    ]
    for index in range(round((high - low) / step) + 1):
        tick = low + index * step
        parts.append(
            f'<line x1="{across(tick):.1f}" x2="{across(tick):.1f}" y1="{HEAD - 6}" y2="{bottom}" '
            f'stroke="{GRID}"/><text x="{across(tick):.1f}" y="{bottom + 18}" fill="{SOFT}" '
            f'text-anchor="middle">{tick:g}</text>'
        )
    for index, (row, found) in enumerate(shown):
        parts += _row(row, [across(value) for value in found], HEAD + ROW * index + ROW / 2)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _row(row: Row, places: list[float], middle: float) -> Iterator[str]:
    label = row.label if len(row.label) <= LONGEST else row.label[: LONGEST - 1].rstrip() + "…"
    end_of_label = f'x="{LABELS - 14}" y="{middle + 4:.1f}" text-anchor="end"'
    yield f'<text {end_of_label} fill="{INK}">{escape(label)}</text>'
    mean, (start, end) = statistics.mean(places), _whisker(places)
    yield (
        f'<line x1="{start:.1f}" x2="{end:.1f}" y1="{middle:.1f}" y2="{middle:.1f}" stroke="{MEAN}" '
        f'stroke-width="2"/>'
    )
    for place in places:
        yield f'<circle cx="{place:.1f}" cy="{middle:.1f}" r="4" fill="{DOT}" fill-opacity="0.45"/>'
    yield f'<rect x="{mean - 2:.1f}" y="{middle - 8:.1f}" width="4" height="16" rx="1" fill="{MEAN}"/>'


def _whisker(values: list[float]) -> tuple[float, float]:
    """The ends of the mean's 95 % t-interval."""
    mean, spread = statistics.mean(values), half_width(values) if len(values) > 1 else 0.0
    return mean - spread, mean + spread


def _axis(values: list[float]) -> tuple[float, float, float]:
    """(lowest, highest, step) of an axis of at most eight steps around the values."""
    least, most = min(values), max(values)
    for step in STEPS:
        low, high = step * math.floor(least / step), step * math.ceil(most / step)
        if high - low <= 8 * step:
            return low, max(high, low + step), step
    return least, most + 1, most + 1 - least
