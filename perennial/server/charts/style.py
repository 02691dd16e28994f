"""How charts look: rules over the colours that a page names, light and dark."""

from perennial.server.charts.cells import SHADES
from perennial.server.charts.curves import LINE_STYLES

_DASHES = ("none", "8 4", "2 4", "8 3 2 3", "13 4", "13 3 2 3")
_STOPS = 4
"""Steps between the five colours --scale-0 to --scale-4."""


def _looks() -> str:
    rules = []
    for look in range(LINE_STYLES):
        colour = f"var(--c{look + 1})"
        rules += [
            f".line.l{look}, .error.l{look} {{ stroke: {colour}; }}",
            f".line.l{look} {{ stroke-dasharray: {_DASHES[look]}; }}",
            f".dot.l{look}, .end.l{look}, .column.l{look}, .area.l{look} {{ fill: {colour}; }}",
            f".dot.l{look} {{ stroke: {colour}; }}",
        ]
    return "\n".join(rules)


def _shades() -> str:
    rules = []
    for shade in range(SHADES + 1):
        stop, rest = divmod(shade * _STOPS, SHADES)
        share = 100 * rest / SHADES
        colour = f"var(--scale-{stop})"
        if rest:
            colour = f"color-mix(in srgb, var(--scale-{stop + 1}) {share:g}%, {colour})"
        rules.append(f".s{shade} {{ fill: {colour}; }}")
    return "\n".join(rules)


CHARTS = f"""
.drawing {{ overflow-x: auto; }}
.chart {{ display: block; width: 100%; height: auto; font-variant-numeric: tabular-nums; }}
.half .chart {{ min-width: 20rem; }} .wide .chart {{ min-width: 38rem; }}
.chart text {{ font-size: 12.5px; }} .tick, .title {{ fill: var(--quiet); }}
.value, .within {{ fill: var(--ink); }} .within.deep {{ fill: var(--surface); }}
.within {{ pointer-events: none; }}
.grid {{ stroke: var(--rule); }} .base {{ stroke: var(--quiet); }} .band {{ fill: var(--band); }}
.line {{ fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }}
.line.reference {{ stroke: var(--quiet); stroke-width: 1; stroke-dasharray: 2 4; }}
.error {{ fill: none; stroke-width: 1.2; }} .error.ink {{ stroke: var(--ink); }}
.area {{ opacity: .16; }} .dot.l4, .dot.l5 {{ fill: none; stroke-width: 2; }}
.hit {{ fill: transparent; }} .hit:hover {{ fill: color-mix(in srgb, var(--ink) 6%, transparent); }}
.cell:hover, .column:hover {{ opacity: .85; }}
.idle {{ fill: var(--idle); }} .away {{ fill: var(--away); }} .under {{ fill: var(--under); }}
.dropped {{ fill: var(--c2); }} .joined {{ fill: var(--joined); }}
.legend {{ display: flex; flex-wrap: wrap; gap: .15rem 1.2rem; margin: 0 0 .5rem; padding: 0;
  list-style: none; font-size: .84rem; }}
.key {{ width: 22px; height: 10px; margin-right: .4rem; vertical-align: middle; }}
{_looks()}
.dot.l4, .dot.l5 {{ fill: none; }}
{_shades()}
"""
