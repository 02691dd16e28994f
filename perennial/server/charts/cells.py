"""Grids of cells: values by shade. The first row is on top."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perennial.server.charts.frame import (
    LETTER,
    TICKS_ACROSS,
    Axis,
    Frame,
    box,
    drawing,
    text,
)
from perennial.server.report.markup import Markup, label

SHADES = 20
"""Steps from the lightest shade to the darkest."""
DEEP = 0.6
"""The share of the largest value from which a cell's text has the colour of the surface."""


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
