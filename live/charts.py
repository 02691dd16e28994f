"""Charts as SVG, drawn by the server: they need no script, and take their colours from the page's style.

Styles inside the markup are forbidden by the pages' policy, so shapes have classes and plain attributes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perennial.server.report.markup import Markup, escape

WIDTH, HEIGHT = 440, 190
LEFT, RIGHT, TOP, BOTTOM = 40, 12, 10, 26
MOST_POINTS = 400
"""Points of one line; longer series are thinned, because a screen has no more columns for them."""
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One line of a chart. points: (x, y), y from 0 to 1; None interrupts it. label: said in the legend."""

    label: str
    points: Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Mark:
    """An upright mark at x, such as the end of a task or a skipped round. kind: its class in the style."""

    x: float
    kind: str
    label: str = ""


def line_chart(
    lines: Sequence[Line],
    first: float,
    last: float,
    description: str,
    marks: Sequence[Mark] = (),
    unit: str = "round",
) -> Markup:
    """Shares (0 to 1) over rounds or tasks.

    first, last: of the x axis. description: for a person who cannot see the chart.
    """
    span = max(last - first, 1e-9)

    def at(x: float, y: float) -> Point:
        across = LEFT + (x - first) / span * (WIDTH - LEFT - RIGHT)
        return across, TOP + (1 - min(max(y, 0.0), 1.0)) * (HEIGHT - TOP - BOTTOM)

    parts = [_grid(), _axis(first, last, at, unit)]
    for mark in marks:
        x, _ = at(mark.x, 0)
        title = f"<title>{escape(mark.label)}</title>" if mark.label else ""
        parts.append(
            f'<line class="mark {escape(mark.kind)}" x1="{x:.1f}" x2="{x:.1f}" '
            f'y1="{TOP}" y2="{HEIGHT - BOTTOM}">{title}</line>'
        )
    for index, line in enumerate(lines):
        parts.append(_drawn(line, index, at))
    return _figure("".join(parts), description, lines)


def _drawn(line: Line, index: int, at: Callable[[float, float], Point]) -> str:
    """One line with its newest point marked; the legend's number ties it to its colour."""
    known = [(x, y) for x, y in line.points if y is not None]
    if not known:
        return ""
    path, before = [], None
    points = _thinned(line.points)
    for x, y in points:
        if y is None:
            before = None
            continue
        across, down = at(x, y)
        path.append(f"{'M' if before is None else 'L'}{across:.1f} {down:.1f}")
        before = (across, down)
    across, down = at(*known[-1])
    return (
        f'<path class="line l{index % 6}" d="{"".join(path)}"/>'
        f'<circle class="end l{index % 6}" cx="{across:.1f}" cy="{down:.1f}" r="3.5">'
        f"<title>{escape(line.label)}: {100 * known[-1][1]:.1f} %</title></circle>"
    )


def _thinned(points: Sequence[tuple[float, float | None]]) -> Sequence[tuple[float, float | None]]:
    """At most MOST_POINTS of the points, the newest among them."""
    if len(points) <= MOST_POINTS:
        return points
    step = len(points) / MOST_POINTS
    return [*(points[int(index * step)] for index in range(MOST_POINTS - 1)), points[-1]]


def _grid() -> str:
    lines = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = TOP + (1 - share) * (HEIGHT - TOP - BOTTOM)
        lines.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{100 * share:.0f}</text>'
        )
    return "".join(lines)


def _axis(first: float, last: float, at: Callable[[float, float], Point], unit: str) -> str:
    texts = []
    for index, x in enumerate(_ticks(first, last)):
        across, _ = at(x, 0)
        words = f"{unit} {x:.0f}" if index == 0 else f"{x:.0f}"
        anchor = "start" if index == 0 else "middle" if x < last else "end"
        texts.append(
            f'<text class="tick" x="{across:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{words}</text>'
        )
    return "".join(texts)


def _ticks(first: float, last: float) -> list[float]:
    """Whole numbers from first to last, six at most."""
    span = int(last - first)
    step = next(
        (
            size
            for power in range(9)
            for size in (10**power, 2 * 10**power, 5 * 10**power)
            if span <= 5 * size
        ),
        span or 1,
    )
    inner = [x for x in range((int(first) // step + 1) * step, int(last), step) if x - first > step / 2]
    ticks = [first, *(float(x) for x in inner if last - x > step / 2)]
    return [*ticks, last] if last > first else ticks


def _figure(drawn: str, description: str, lines: Sequence[Line]) -> Markup:
    words = escape(description)
    legend = "".join(
        f'<li><svg class="key" viewBox="0 0 14 4" aria-hidden="true"><path class="line l{index % 6}" '
        f'd="M0 2H14"/></svg>{escape(line.label)}</li>'
        for index, line in enumerate(lines)
    )
    listed = f'<ul class="legend">{legend}</ul>' if len(lines) > 1 else ""
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{words}">{drawn}</svg>'
        f"{listed}"
    )


def meter(share: float, words: object, kind: str = "") -> Markup:
    """A bar that is filled to a share, with its meaning in words."""
    width = 100 * min(max(share, 0.0), 1.0)
    return Markup(
        f'<span class="meter"><svg viewBox="0 0 100 4" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="empty" width="100" height="4"/><rect class="full {escape(kind)}" width="{width:.1f}" '
        f'height="4"/></svg><span>{escape(words)}</span></span>'
    )
