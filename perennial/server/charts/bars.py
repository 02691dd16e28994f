"""Bar charts: a horizontal bar for each name, or vertical bars for each round."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from perennial.server.charts.curves import Span, draw_spans
from perennial.server.charts.frame import (
    LETTER,
    TICKS_ACROSS,
    TICKS_UP,
    Axis,
    Frame,
    box,
    drawing,
    legend,
    line,
    text,
)
from perennial.server.report.markup import Markup, label

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
class Columns:
    """Vertical bars, side by side, at each of some places.

    places: whole numbers, such as rounds. series: (name, look from 0, a value for each place or None).
    words: turns a value into text. place: what a place is called.
    """

    places: Sequence[int]
    series: Sequence[tuple[str, int, Sequence[float | None]]]
    up: Axis
    words: Callable[[float], str]
    place: str
    height: int
    spans: Sequence[Span] = ()

    def drawn(self, width: int, words: str) -> Markup:
        """Draw the chart with its legend. words: a description for people who cannot see it."""
        values = [value for _, _, row in self.series for value in row if value is not None]
        low, high = self.up.over([0.0, *values])
        marks = self.up.marks(low, high, TICKS_UP)
        titles = self.place, self.up.title
        frame = Frame.around(width, self.height, [words for _, words in marks], titles, 24.0, 12.0)
        first, last = self.places[0] - 0.5, self.places[-1] + 0.5
        across, up = frame.across(first, last), frame.up(low, high)
        axis = Axis(whole=True, grid=False)
        parts = [
            *draw_spans(self.spans, frame, across),
            *frame.axis_up(self.up, up, marks),
            *frame.axis_across(axis, across, axis.marks(first, last, TICKS_ACROSS)),
            *frame.titles(*titles),
        ]
        wide = 0.8 * across.unit / len(self.series)
        for index, place in enumerate(self.places):
            start = across(place) - 0.4 * across.unit
            said = [f"{self.place} {place}"]
            for number, (name, look, row) in enumerate(self.series):
                value = row[index]
                if value is None:
                    continue
                said.append(f"{name}: {self.words(value)}" if name else self.words(value))
                top = up(value)
                parts.append(box(f"column l{look}", start + number * wide, top, wide, frame.bottom - top))
            left = across(place - 0.5)
            parts.append(box("hit", left, frame.top, across.unit, frame.bottom - frame.top, "\n".join(said)))
        keys = [(box(f"column l{look}", 6, 0, 10, 10), name) for name, look, _ in self.series]
        return Markup(legend(keys) + drawing(width, self.height, parts, words))
