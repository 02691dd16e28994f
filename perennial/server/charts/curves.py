"""Curves and scattered points over numbers or names, with bands and intervals; heat maps.

Curves differ in dash and symbol too, not in colour alone.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from perennial.server.charts.frame import (
    LETTER,
    TICKS_ACROSS,
    TICKS_UP,
    Axis,
    Frame,
    Scale,
    assemble_chart,
    draw_box,
    draw_legend,
    draw_text,
)
from perennial.server.report.markup import Markup, escape, label

MOST_POINTS = 400
"""Points of one curve; longer ones are thinned, because a screen has no more columns for them."""
LINE_STYLES = 6
"""Colours, dashes and symbols that curves have in turn."""
Value = tuple[float, float | None]


@dataclass(frozen=True)
class Curve:
    """One curve.

    points: (x, y); a y of None interrupts it, unless it is bridged. tells: text shown when a point is
    pointed at. intervals: (low, high) of each point, or None. band: (x, low, high) of the area behind it.
    labels: over each point. reference: whether it is a thin line for comparison, without text.
    """

    name: str
    points: Sequence[Value]
    tells: Sequence[str] = ()
    joined: bool = True
    dots: bool = True
    bridged: bool = False
    intervals: Sequence[tuple[float, float] | None] = ()
    band: Sequence[tuple[float, float, float]] = ()
    labels: Sequence[str] = ()
    reference: bool = False


@dataclass(frozen=True)
class Span:
    """A part of the x axis with a name over it, such as a task. shaded: whether it has a background."""

    low: float
    high: float
    name: str
    shaded: bool


@dataclass(frozen=True)
class Curves:
    """Curves in one chart. height: in pixels.

    together: whether pointing at a place shows all curves' text there, led by its x in the words of `place`.
    """

    curves: Sequence[Curve]
    across: Axis
    up: Axis
    height: int
    spans: Sequence[Span] = ()
    together: bool = False
    place: str = ""

    @property
    def count(self) -> int:
        return sum(y is not None for curve in self.curves if not curve.reference for _, y in curve.points)

    def drawn(self, width: int, words: str) -> Markup:
        """Draw the chart with its legend. words: a description for people who cannot see it."""
        xs = [x for curve in self.curves for x, _ in curve.points]
        low_x, high_x = self.across.over(xs)
        if self.across.names is not None:
            low_x, high_x = -0.5, max(len(self.across.names), 1) - 0.5
        low_y, high_y = self.up.over([*_list_heights(self.curves)])
        marks_up = self.up.place_marks(low_y, high_y, TICKS_UP)
        titles = self.across.title, self.up.title
        frame = Frame.fit_around(
            width, self.height, [words for _, words in marks_up], titles, 24.0 if self.spans else 10.0, 12.0
        )
        across, up = frame.scale_across(low_x, high_x), frame.scale_up(low_y, high_y)
        parts = [
            *draw_spans(self.spans, frame, across),
            *frame.draw_axis_up(self.up, up, marks_up),
            *frame.draw_axis_across(
                self.across, across, self.across.place_marks(low_x, high_x, TICKS_ACROSS)
            ),
            *frame.draw_titles(*titles),
        ]
        looks = [*_choose_looks(self.curves)]
        for curve, look in zip(self.curves, looks, strict=True):
            parts += _draw_uncertainty(curve, look, across, up)
        for curve, look in zip(self.curves, looks, strict=True):
            parts += _draw_curve(curve, look, across, up, told=not self.together)
        if self.together:
            parts += self._draw_tellers(frame, across)
        keys = [
            (_draw_key(curve, look), curve.name)
            for curve, look in zip(self.curves, looks, strict=True)
            if curve.name
        ]
        return Markup(draw_legend(keys) + assemble_chart(width, self.height, parts, words))

    def _draw_tellers(self, frame: Frame, across: Scale) -> Iterator[str]:
        """Invisible columns, one for each x, that tell what all curves have there."""
        said: dict[float, list[str]] = {}
        for curve in self.curves:
            for (x, y), words in zip(curve.points, curve.tells, strict=False):
                if y is not None:
                    said.setdefault(x, []).append(f"{curve.name}: {words}")
        places = sorted(said)
        edges = [(a + b) / 2 for a, b in pairwise(places)]
        ends = zip(
            [across.low, *edges] if places else [], [*edges, across.high] if places else [], strict=True
        )
        names = self.across.names
        for x, (low, high) in zip(places, ends, strict=True):
            where = names[int(x)] if names is not None else f"{self.place} {self.across.words(x)}".strip()
            title = "\n".join([where, *said[x]])
            start = across(low)
            yield draw_box("hit", start, frame.top, across(high) - start, frame.bottom - frame.top, title)


def _list_heights(curves: Iterable[Curve]) -> Iterator[float]:
    for curve in curves:
        yield from (y for _, y in curve.points if y is not None)
        yield from chain.from_iterable(ends for ends in curve.intervals if ends is not None)
        yield from chain.from_iterable((low, high) for _, low, high in curve.band)


def _choose_looks(curves: Iterable[Curve]) -> Iterator[str]:
    """The classes of each curve."""
    index = 0
    for curve in curves:
        yield "reference" if curve.reference else f"l{index % LINE_STYLES}"
        index += not curve.reference


def draw_spans(spans: Sequence[Span], frame: Frame, across: Scale) -> Iterator[str]:
    """The background and the name of each span."""
    for span in spans:
        start, end = across(span.low), across(span.high)
        if span.shaded:
            yield draw_box("band", start, frame.top, end - start, frame.bottom - frame.top)
        if span.name:
            yield draw_text((start + end) / 2, frame.top - 7, span.name, "tick", "middle")


def _draw_uncertainty(curve: Curve, look: str, across: Scale, up: Scale) -> Iterator[str]:
    if curve.band:
        edge = [(x, high) for x, _, high in curve.band] + [(x, low) for x, low, _ in reversed(curve.band)]
        steps = "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in edge)
        yield f'<path class="area {look}" d="M{steps}Z"/>'
    for (x, _), ends in zip(curve.points, curve.intervals, strict=False):
        if ends is not None:
            place, low, high = across(x), up(ends[0]), up(ends[1])
            caps = f"M{place - 3:.1f} {low:.1f}h6M{place - 3:.1f} {high:.1f}h6"
            yield f'<path class="error {look}" d="M{place:.1f} {low:.1f}V{high:.1f}{caps}"/>'


def _draw_curve(curve: Curve, look: str, across: Scale, up: Scale, told: bool) -> Iterator[str]:
    points = [*enumerate(curve.points)]
    if curve.bridged:
        points = [(index, point) for index, point in points if point[1] is not None]
    points = select_points(points)
    if curve.joined:
        path, pen = [], "M"
        for _, (x, y) in points:
            if y is None:
                pen = "M"
                continue
            path.append(f"{pen}{across(x):.1f} {up(y):.1f}")
            pen = "L"
        if path:
            yield f'<path class="line {look}" d="{"".join(path)}"/>'
    known = [(index, x, y) for index, (x, y) in points if y is not None]
    if not curve.dots and not curve.reference and known:
        index, x, y = known[-1]
        title = f"{curve.name}: {curve.tells[index]}" if index < len(curve.tells) else curve.name
        yield (
            f'<circle class="end {look}" cx="{across(x):.1f}" cy="{up(y):.1f}" r="3.5">'
            f"<title>{escape(title)}</title></circle>"
        )
    for index, x, y in known:
        title = curve.tells[index] if told and index < len(curve.tells) else ""
        if curve.dots:
            yield draw_dot(look, across(x), up(y), title)
        if index < len(curve.labels):
            yield draw_text(across(x), up(y) - 9, label(curve.labels[index]), "value", "middle")


def select_points(points: Sequence[tuple[int, Value]]) -> list[tuple[int, Value]]:
    """A selection of at most MOST_POINTS of the points, the newest among them."""
    if len(points) <= MOST_POINTS:
        return [*points]
    step = len(points) / MOST_POINTS
    return [*(points[int(index * step)] for index in range(MOST_POINTS - 1)), points[-1]]


_SYMBOLS = {
    "l0": "m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0Z",
    "l1": "m-3.2-3.2h6.4v6.4h-6.4Z",
    "l2": "m0-4.4l4.4 4.4l-4.4 4.4l-4.4-4.4Z",
    "l3": "m0-4.2l4.2 7.4h-8.4Z",
    "l4": "m-3.4-3.4l6.8 6.8m0-6.8l-6.8 6.8",
    "l5": "m-4.2 0h8.4m-4.2-4.2v8.4",
}


def draw_dot(look: str, x: float, y: float, title: str = "") -> str:
    """The symbol of a curve with this look. title: shown when it is pointed at."""
    shape = f'class="dot {look}" d="M{x:.1f} {y:.1f}{_SYMBOLS.get(look, _SYMBOLS["l0"])}"'
    return f"<path {shape}><title>{escape(title)}</title></path>" if title else f"<path {shape}/>"


def _draw_key(curve: Curve, look: str) -> str:
    shapes = f'<path class="line {look}" d="M0 5H22"/>' if curve.joined else ""
    return shapes + (draw_dot(look, 11, 5) if curve.dots and not curve.reference else "")


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
        frame = Frame.fit_around(width, self.height, rows, self.titles, 4.0, 4.0)
        wide = (frame.right - frame.left) / max(len(columns), 1)
        tall = (frame.bottom - frame.top) / max(len(rows), 1)
        parts = [*frame.draw_titles(*self.titles)]
        below = Axis(names=columns, grid=False)
        scale = frame.scale_across(-0.5, len(columns) - 0.5)
        parts += frame.draw_axis_across(
            below, scale, below.place_marks(0, 0, max(TICKS_ACROSS, len(columns)))
        )
        every = -(-14 // max(1, int(tall)))
        for row, name in enumerate(rows):
            middle = frame.top + (row + 0.5) * tall
            if row % every == 0:
                parts.append(draw_text(frame.left - 7, middle + 4, name, "tick", "end"))
            for column, value in enumerate(self.values[row]):
                if value is None:
                    continue
                share = min(max(value / (self.largest or 1.0), 0.0), 1.0)
                x, y = frame.left + column * wide, frame.top + row * tall
                kind, said = f"cell s{round(share * SHADES)}", self.tell(row, column)
                parts.append(draw_box(kind, x + 1.5, y + 1.5, wide - 3, tall - 3, said))
                words_in = self.texts[row][column]
                if words_in and tall >= 14 and LETTER * len(words_in) < wide:
                    kind = "within deep" if share >= DEEP else "within"
                    parts.append(draw_text(x + wide / 2, middle + 4, words_in, kind, "middle"))
        return assemble_chart(width, self.height, parts, words)
