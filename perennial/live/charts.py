"""Charts of the live pages: shares over rounds or tasks, drawn as in reports, and meters."""

from collections.abc import Sequence

from perennial.server.charts.curves import AxisMark, Curve, Curves, Value
from perennial.server.charts.frame import Axis
from perennial.server.report.markup import Markup, escape, percent

WIDTH, HEIGHT = 440, 200


def share_curve(name: str, points: Sequence[Value]) -> Curve:
    """One curve of shares (0 to 1). points: (x, y); None interrupts it."""
    return Curve(name, points, [percent(y) for _, y in points], dots=False)


def share_chart(
    curves: Sequence[Curve],
    first: float,
    last: float,
    description: str,
    marks: Sequence[AxisMark] = (),
    unit: str = "round",
) -> Markup:
    """Shares over rounds or tasks. first, last: of the x axis. description: for people who cannot see it."""
    across = Axis(unit, first, last, "{:.0f}".format, whole=True, grid=False)
    up = Axis(low=0.0, high=1.0, words=lambda share: f"{100 * share:.0f}")
    return Curves(curves, across, up, HEIGHT, marks=marks).drawn(WIDTH, description)


def meter(share: float, words: object, kind: str = "") -> Markup:
    """A bar that is filled to a share, with its meaning in words."""
    width = 100 * min(max(share, 0.0), 1.0)
    return Markup(
        f'<span class="meter"><svg viewBox="0 0 100 4" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="empty" width="100" height="4"/><rect class="full {escape(kind)}" width="{width:.1f}" '
        f'height="4"/></svg><span>{escape(words)}</span></span>'
    )
