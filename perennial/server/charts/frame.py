"""The parts that all charts share: scales, ticks, axes and legends.

Styles inside the markup are forbidden by the pages' policies, so shapes have classes and plain attributes.
Places are in pixels of the drawing, from its upper left corner.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import floor, log10

from perennial.server.report.markup import Markup, escape, format_decimal, format_percent, label

LETTER = 6.7
"""Mean width of a letter beside an axis, in pixels."""
TICKS_ACROSS = 12
TICKS_UP = 6


@dataclass(frozen=True)
class Scale:
    """Converts numbers of an axis to places in pixels: low lies at start, high at end."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.start + share * (self.end - self.start)

    @property
    def unit(self) -> float:
        """Pixels between the values 0 and 1."""
        return abs(self(1.0) - self(0.0))


@dataclass(frozen=True)
class Axis:
    """One axis.

    low, high: its ends; None: as the values need. words: turns a number into a tick's text. names: stand at
    0, 1, ... in place of numbers. whole: mark whole numbers only. ticks, grid: whether they are drawn.
    """

    title: str = ""
    low: float | None = None
    high: float | None = None
    words: Callable[[float], str] = format_decimal
    names: Sequence[str] | None = None
    whole: bool = False
    ticks: bool = True
    grid: bool = True

    def over(self, values: Sequence[float]) -> tuple[float, float]:
        """The axis's two ends, taken from the values where it has none of its own."""
        low = self.low if self.low is not None else min(values, default=0.0)
        high = self.high if self.high is not None else max(values, default=1.0)
        if high <= low:
            high = low + (abs(low) or 1.0)
        room = 0.05 * (high - low)
        return low - room * (self.low is None), high + room * (self.high is None)

    def place_marks(self, low: float, high: float, most: int) -> list[tuple[float, str]]:
        """(number, text) of at most about `most` ticks from low to high."""
        if not self.ticks:
            return []
        if self.names is None:
            return [(at, self.words(at)) for at in round_numbers(low, high, most, self.whole)]
        every = -(-len(self.names) // most)
        return [(at, label(name)) for at, name in enumerate(self.names) if at % every == 0]


def round_numbers(low: float, high: float, most: int, whole: bool) -> list[float]:
    """At most `most` multiples of 1, 2 or 5 times a power of ten, from low to high."""
    size = 10.0 ** floor(log10((high - low) / most))
    steps = [factor * size for factor in (1, 2, 5, 10)]
    fitting = [step for step in steps if floor(high / step + 1e-9) - floor(low / step - 1e-9) <= most]
    step = max(1.0, fitting[0]) if whole else fitting[0]
    if whole:
        step = float(round(step))
    first, last = floor(low / step - 1e-9) + 1, floor(high / step + 1e-9)
    return [number * step + 0.0 for number in range(first, last + 1)]


@dataclass(frozen=True)
class Frame:
    """The area of a chart's values inside a drawing of width x height."""

    width: int
    height: int
    left: float
    right: float
    top: float
    bottom: float

    @classmethod
    def fit_around(
        cls, width: int, height: int, up: Sequence[str], titles: tuple[str, str], top: float, right: float
    ) -> "Frame":
        """A frame with room for `up`, the texts beside the upright axis, and for the titles of both axes."""
        left = 10 + LETTER * max(map(len, up), default=0) + (18 if titles[1] else 0)
        bottom = height - 24 - (18 if titles[0] else 0)
        return cls(width, height, min(left, 0.4 * width), width - right, top, bottom)

    def scale_across(self, low: float, high: float) -> Scale:
        """The scale from left to right."""
        return Scale(low, high, self.left, self.right)

    def scale_up(self, low: float, high: float) -> Scale:
        """The scale from bottom to top."""
        return Scale(low, high, self.bottom, self.top)

    def draw_titles(self, across: str, up: str) -> Iterator[str]:
        """Draw the titles of both axes."""
        if across:
            yield draw_text((self.left + self.right) / 2, self.height - 6, across, "title", "middle")
        if up:
            x, y = 12, (self.top + self.bottom) / 2
            yield (
                f'<text class="title" transform="translate({x} {y:.1f}) rotate(-90)" '
                f'text-anchor="middle">{escape(up)}</text>'
            )

    def draw_axis_across(self, axis: Axis, scale: Scale, marks: Sequence[tuple[float, str]]) -> Iterator[str]:
        """Draw the horizontal axis with its grid."""
        widest = LETTER * max((len(words) for _, words in marks), default=0) + 8
        apart = abs(scale(marks[1][0]) - scale(marks[0][0])) if len(marks) > 1 else widest
        every = -(-int(widest) // max(1, int(apart)))
        for index, (at, words) in enumerate(marks):
            x = scale(at)
            if axis.grid:
                yield draw_line("grid", (x, self.top), (x, self.bottom))
            if index % every == 0:
                near_end = x + widest / 2 > self.width
                anchor, place = ("end", self.width - 2.0) if near_end else ("middle", x)
                yield draw_text(place, self.bottom + 17, words, "tick", anchor)

    def draw_axis_up(self, axis: Axis, scale: Scale, marks: Sequence[tuple[float, str]]) -> Iterator[str]:
        """Draw the vertical axis with its grid."""
        for at, words in marks:
            y = scale(at)
            if axis.grid:
                yield draw_line("grid", (self.left, y), (self.right, y))
            yield draw_text(self.left - 7, y + 4, words, "tick", "end")


def draw_line(kind: str, start: tuple[float, float], end: tuple[float, float]) -> str:
    """A straight line. kind: its class in the page's style."""
    return (
        f'<line class="{escape(kind)}" x1="{start[0]:.1f}" y1="{start[1]:.1f}" '
        f'x2="{end[0]:.1f}" y2="{end[1]:.1f}"/>'
    )


def draw_box(kind: str, x: float, y: float, width: float, height: float, title: str = "") -> str:
    """A rectangle. kind: its class in the page's style. title: shown when it is pointed at."""
    shape = f'class="{escape(kind)}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f"<rect {shape}><title>{escape(title)}</title></rect>" if title else f"<rect {shape}/>"


def draw_text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    """One line of text. kind: its class in the page's style."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def assemble_chart(width: int, height: int, parts: Sequence[str], words: str) -> Markup:
    """A whole chart from its parts. words: a description for people who cannot see it."""
    return Markup(
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(words)}">'
        f"{''.join(parts)}</svg>"
    )


LONGEST_KEY = 160
"""Characters of an entry of a legend, which may be set in several lines."""


def draw_legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """A legend of (shapes in a box of 22 x 10, words) entries; '' for a single entry."""
    if len(entries) < 2:
        return Markup("")
    keys = "".join(
        f'<li><svg class="key" viewBox="0 0 22 10" aria-hidden="true">{shapes}</svg>'
        f"{escape(label(words, LONGEST_KEY))}</li>"
        for shapes, words in entries
    )
    return Markup(f'<ul class="legend">{keys}</ul>')


def format_whole_percent(share: float) -> str:
    """The text of a tick on an axis of shares."""
    return format_percent(share, 0)


SHARES = Axis(low=0.0, high=1.03, words=format_whole_percent)
"""The upright axis of accuracies."""


def build_task_axis(tasks: int) -> Axis:
    """The horizontal axis of charts over a run's tasks."""
    return Axis("after task", low=0.7, high=tasks + 0.3, words="{:.0f}".format, whole=True, grid=False)
