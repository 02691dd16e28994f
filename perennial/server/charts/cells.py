"""Bars, one for each name, and grids of cells: values by shade, and states by colour."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from perennial.server.charts.frame import (
    LETTER,
    TICKS_ACROSS,
    Axis,
    Frame,
    box,
    drawing,
    legend,
    line,
    text,
)
from perennial.server.report.markup import Markup, label

SHADES = 20
"""Steps from the lightest shade to the darkest."""
DEEP = 0.6
"""The share of the largest value from which a cell's text has the colour of the surface."""
MOST_ROWS = 300
MOST_COLUMNS = 200
"""Cells that a grid of states has at most; more than that no screen shows, and no page should carry."""


TALLEST = 1200
"""Pixels of a chart with a bar for each of many names."""


@dataclass(frozen=True)
class NamedBars:
    """One horizontal bar for each name.

    values: what is not finite has no bar. words: turns a value into text. intervals: (low, high) of each,
    drawn in place of the number beside the bar.
    """

    values: Mapping[str, float]
    axis: Axis
    words: Callable[[float], str]
    intervals: Sequence[tuple[float, float]] = ()

    @property
    def count(self) -> int:
        return len(self.values)

    @property
    def height(self) -> int:
        """Height in pixels."""
        return min(70 + 30 * len(self.values), TALLEST)

    def drawn(self, width: int, words: str) -> Markup:
        """Draw the chart. words: a description for people who cannot see it."""
        known = [value for value in self.values.values() if math.isfinite(value)]
        ends = [end for interval in self.intervals for end in interval]
        low, high = self.axis.over([0.0, *known, *ends])
        low = min(0.0, low) if min([0.0, *known, *ends]) < 0 else 0.0
        names = [label(name) for name in self.values]
        beside = max((LETTER * len(self.words(value)) + 10 for value in known), default=12.0)
        frame = Frame.around(width, self.height, names, (self.axis.title, ""), 6.0, max(12.0, beside))
        across = frame.across(low, high)
        step = (frame.bottom - frame.top) / max(len(names), 1)
        parts = [
            *frame.axis_across(self.axis, across, self.axis.marks(low, high, TICKS_ACROSS)),
            *frame.titles(self.axis.title, ""),
            line("base", (across(0.0), frame.top), (across(0.0), frame.bottom)),
        ]
        every = math.ceil(14 / step)
        for index, (name, value) in enumerate(self.values.items()):
            middle = frame.top + (index + 0.5) * step
            if index % every == 0:
                parts.append(text(frame.left - 7, middle + 4, names[index], "tick", "end"))
            if not math.isfinite(value):
                continue
            start, end = sorted((across(0.0), across(value)))
            title = f"{name}: {self.words(value)}"
            if index < len(self.intervals):
                title += ", {} to {}".format(*map(self.words, self.intervals[index]))
            parts.append(box("column l0", start, middle - step / 4, end - start, step / 2, title))
            if index < len(self.intervals):
                left, right = (across(each) for each in self.intervals[index])
                caps = f"M{left:.1f} {middle - 3:.1f}v6M{right:.1f} {middle - 3:.1f}v6"
                parts.append(f'<path class="error ink" d="M{left:.1f} {middle:.1f}H{right:.1f}{caps}"/>')
            elif step >= 14:
                parts.append(text(end + 5, middle + 4, self.words(value), "value"))
        return drawing(width, self.height, parts, words)


@dataclass(frozen=True)
class HeatMap:
    """Values by shade.

    values: from 0 to largest; None has no cell. texts: what stands in the cells.
    tell: of (row, column), what a cell says when it is pointed at. titles: of the axes, across and up.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    texts: Sequence[Sequence[str]]
    tell: Callable[[int, int], str]
    largest: float
    height: int
    titles: tuple[str, str] = ("", "")

    @property
    def count(self) -> int:
        return sum(value is not None for row in self.values for value in row)

    def drawn(self, width: int, words: str) -> Markup:
        """The chart. words: for a person who cannot see it."""
        rows, columns = [label(name) for name in self.rows], [label(name) for name in self.columns]
        frame = Frame.around(width, self.height, rows, self.titles, 4.0, 4.0)
        wide = (frame.right - frame.left) / max(len(columns), 1)
        tall = (frame.bottom - frame.top) / max(len(rows), 1)
        parts = [*frame.titles(*self.titles)]
        below = Axis(names=columns, grid=False)
        scale = frame.across(-0.5, len(columns) - 0.5)
        parts += frame.axis_across(below, scale, below.marks(0, 0, max(TICKS_ACROSS, len(columns))))
        every = -(-14 // max(1, int(tall)))
        for row, name in enumerate(rows):
            middle = frame.top + (row + 0.5) * tall
            if row % every == 0:
                parts.append(text(frame.left - 7, middle + 4, name, "tick", "end"))
            for column, value in enumerate(self.values[row]):
                if value is None:
                    continue
                share = min(max(value / (self.largest or 1.0), 0.0), 1.0)
                x, y = frame.left + column * wide, frame.top + row * tall
                kind, said = f"cell s{round(share * SHADES)}", self.tell(row, column)
                parts.append(box(kind, x + 1.5, y + 1.5, wide - 3, tall - 3, said))
                words_in = self.texts[row][column]
                if words_in and tall >= 14 and LETTER * len(words_in) < wide:
                    kind = "within deep" if share >= DEEP else "within"
                    parts.append(text(x + wide / 2, middle + 4, words_in, kind, "middle"))
        return drawing(width, self.height, parts, words)


@dataclass(frozen=True)
class State:
    """name, kind: words in the legend, and the class of its cells."""

    name: str
    kind: str


@dataclass(frozen=True)
class States:
    """The state of each row in each column, by its number; a column that stands for several has the largest.

    columns: whole numbers, such as rounds, in order. codes: (rows, columns) numbers of states.
    notes: by (row, column), what is said beside the state's name. place: what a column is called.
    """

    rows: Sequence[str]
    columns: Sequence[int]
    codes: Sequence[Sequence[int]]
    states: Sequence[State]
    notes: Mapping[tuple[int, int], str]
    place: str

    @property
    def count(self) -> int:
        return len(self.rows) * len(self.columns)

    @property
    def height(self) -> int:
        """Pixels."""
        rows = len(self.rows)
        return 60 + rows * (26 if rows <= 20 else 14 if rows <= 60 else 6 if rows <= 150 else 3)

    def drawn(self, width: int, words: str) -> Markup:
        """The chart with its legend. words: for a person who cannot see it."""
        names = [label(name) for name in self.rows] if len(self.rows) <= 60 else []
        frame = Frame.around(width, self.height, names, (self.place, ""), 4.0, 4.0)
        joined = -(-len(self.columns) // MOST_COLUMNS)
        count = -(-len(self.columns) // joined)
        wide, tall = (frame.right - frame.left) / count, (frame.bottom - frame.top) / max(len(self.rows), 1)
        gap = 1.0 if joined == 1 and count <= 100 and len(self.rows) <= 60 else 0.0
        first, last = self.columns[0] - 0.5, self.columns[0] - 0.5 + joined * count
        axis = Axis(whole=True, grid=False)
        marks = axis.marks(first, last, TICKS_ACROSS)
        parts = [
            *frame.titles(self.place, ""),
            *frame.axis_across(axis, frame.across(first, last), marks),
        ]
        for row, name in enumerate(self.rows):
            y = frame.top + row * tall
            if names:
                parts.append(text(frame.left - 7, y + tall / 2 + 4, names[row], "tick", "end"))
            for start, end, code, note in self._runs(row, joined, bool(gap)):
                where = self._where(start * joined, end * joined)
                title = f"{name}, {where}: {self.states[code].name}{note}"
                x = frame.left + start * wide + gap
                kind = f"cell {self.states[code].kind}"
                parts.append(box(kind, x, y + gap, (end - start) * wide - 2 * gap, tall - 2 * gap, title))
        present = sorted({code for row in self.codes for code in row}, reverse=True)
        keys = [
            (box(f"cell {self.states[code].kind}", 6, 0, 10, 10), self.states[code].name) for code in present
        ]
        return Markup(legend(keys) + drawing(width, self.height, parts, words))

    def _runs(self, row: int, joined: int, apart: bool) -> Iterator[tuple[int, int, int, str]]:
        """(first column, the one after the last, state, note) of cells that look alike, side by side."""
        codes = self.codes[row]
        groups = [max(codes[at : at + joined]) for at in range(0, len(codes), joined)]
        noted = [
            next((self.notes[row, at] for at in range(start, start + joined) if (row, at) in self.notes), "")
            for start in range(0, len(codes), joined)
        ]
        for key, run in groupby(
            range(len(groups)), key=lambda at: (at if apart else 0, groups[at], noted[at])
        ):
            indices = [*run]
            yield indices[0], indices[-1] + 1, key[1], key[2]

    def _where(self, start: int, end: int) -> str:
        first, last = self.columns[start], self.columns[min(end, len(self.columns)) - 1]
        return f"{self.place} {first}" if first == last else f"{self.place}s {first} to {last}"
