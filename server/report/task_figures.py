"""The charts of a report over tasks and sites, as plotly's JSON. Colours are names of the page's style.

Sites and layers stand at whole-number positions with their names as tick text, so that a site called "3" or
"2026-01-01" does not turn the axis into numbers or dates.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from perennial.server.metrics import forgetting
from perennial.server.report.markup import (
    Figure,
    decimal,
    folded,
    label,
    percent,
    power,
    table,
)
from perennial.server.run_record import Epsilon, Run

SCALE = [[step / 4, f"var(--scale-{step})"] for step in range(5)]
"""One hue from light to dark, which every kind of colour vision and a grey printer tell apart."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross")


def style(index: int) -> dict[str, Any]:
    """Line and marker of the index-th curve, which differ in dash and symbol too, not in colour alone."""
    return {
        "line": {"width": 2, "color": f"var(--c{index % 6 + 1})", "dash": DASHES[index % len(DASHES)]},
        "marker": {"size": 7, "color": f"var(--c{index % 6 + 1})", "symbol": SYMBOLS[index % len(SYMBOLS)]},
    }


def named_axis(names: Sequence[object], **more: Any) -> dict[str, Any]:
    """An axis with one name at each of the positions 0, 1, ..."""
    positions = list(range(len(names)))
    return {"tickmode": "array", "tickvals": positions, "ticktext": [label(name) for name in names], **more}


def heat_map(
    rows: Sequence[object],
    columns: Sequence[object],
    values: Sequence[Sequence[float | None]],
    texts: Sequence[Sequence[str]],
    largest: float,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(data, layout) of a grid of values from 0 to largest, first row on top; texts stand in the cells."""
    trace = {
        "type": "heatmap",
        "z": [list(row) for row in values],
        "text": [list(row) for row in texts],
        "texttemplate": "%{text}",
        "hovertemplate": "%{text}<extra>%{y}, %{x}</extra>",
        "hoverongaps": False,
        "colorscale": SCALE,
        "zmin": 0,
        "zmax": largest,
        "showscale": False,
        "xgap": 3,
        "ygap": 3,
    }
    axis = {"showgrid": False, "showline": False}
    layout = {
        "xaxis": named_axis(columns, **axis),
        "yaxis": named_axis(rows, autorange="reversed", **axis),
    }
    return [trace], layout


def bars_by_name(
    values: Mapping[str, float],
    axis_title: str,
    number_format: str,
    errors: tuple[Sequence[float], Sequence[float]] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any], int]:
    """(data, layout, height) of one horizontal bar for each name.

    number_format: d3's. errors: how far each bar's interval reaches upwards and downwards.
    """
    trace: dict[str, Any] = {
        "type": "bar",
        "orientation": "h",
        "y": list(range(len(values))),
        "x": [value if math.isfinite(value) else None for value in values.values()],
        "marker": {"color": "var(--c1)"},
        "texttemplate": f"%{{x:{number_format}}}",
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": f"%{{y}}: %{{x:{number_format}}}<extra></extra>",
    }
    if errors is not None:
        up, down = errors
        trace["textposition"] = "none"
        trace["error_x"] = {
            "type": "data",
            "array": list(up),
            "arrayminus": list(down),
            "color": "var(--ink)",
            "thickness": 1.2,
            "width": 3,
        }
    layout = {
        "bargap": 0.5,
        "margin": {"r": 48},
        "xaxis": {"title": {"text": axis_title}, "rangemode": "tozero"},
        "yaxis": named_axis(list(values), autorange="reversed", showgrid=False),
    }
    return [trace], layout, min(70 + 30 * len(values), 1200)


def accuracy_matrix(run: Run) -> Figure:
    """Row t, column i: accuracy on task i after task t."""
    matrix = run.summary.accuracy_matrix
    count = len(matrix)
    tasks = list(range(1, count + 1))
    padded = [[*row, *[None] * (count - len(row))] for row in matrix]
    digits = 1 if count <= 6 else 0
    texts = [["" if value is None else f"{100 * value:.{digits}f}" for value in row] for row in padded]
    data, layout = heat_map([f"after {t}" for t in tasks], tasks, padded, texts, 1.0)
    data[0]["hovertemplate"] = "%{y}: %{z:.1%} on task %{x}<extra></extra>"
    layout["xaxis"]["title"] = {"text": "accuracy (%) on the classes of task"}
    return Figure(
        name="accuracy-matrix",
        title="Accuracy matrix",
        description="Each row is the model after one task, each column how well it knows one task's classes.",
        data=data,
        layout=layout,
        height=max(220, min(90 + 56 * count, 560)),
        numbers=folded(
            "Numbers",
            table(
                ["after task", *[f"task {t}" for t in tasks]],
                [[t, *map(percent, row)] for t, row in zip(tasks, padded, strict=True)],
                "l" + "r" * count,
                "Accuracy matrix",
            ),
            count,
        ),
    )


def forgetting_after(matrix: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Forgetting after each task; None after the first, and where the matrix has holes."""
    return [forgetting(matrix[:tasks]) for tasks in range(1, len(matrix) + 1)]


def _error_bars(run: Run) -> dict[str, Any]:
    """The 95 % intervals of what the sites told, noise included."""
    known = zip(run.summary.federated_accuracy, run.summary.federated_interval, strict=False)
    ends = [(None, None) if a is None or i is None else (i[1] - a, a - i[0]) for a, i in known]
    return {"type": "data", "array": [up for up, _ in ends], "arrayminus": [down for _, down in ends]}


def accuracy_over_tasks(run: Run) -> Figure:
    """All classes so far, the newest task, the sites' own samples, and forgetting, after each task."""
    matrix = run.summary.accuracy_matrix
    at_sites = "at the sites (noised)" if any(run.summary.federated_noise) else "at the sites"
    curves: dict[str, Sequence[float | None]] = {
        "all classes so far": run.summary.average_accuracy,
        "newest task": [row[-1] if row else None for row in matrix],
        at_sites: run.summary.federated_accuracy,
        "forgetting": forgetting_after(matrix),
    }
    curves = {name: values for name, values in curves.items() if any(value is not None for value in values)}
    tasks = list(range(1, len(matrix) + 1))
    lowest = min((value for values in curves.values() for value in values if value is not None), default=0.0)
    return Figure(
        name="accuracy-over-tasks",
        title="Accuracy and forgetting over tasks",
        description="How much the model knows of everything so far and of the newest task, and how far "
        "earlier tasks have fallen from their best.",
        data=[
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": tasks,
                "y": list(values),
                "hovertemplate": "%{y:.1%}",
                **({"error_y": _error_bars(run)} if name == at_sites else {}),
                **style(index),
            }
            for index, (name, values) in enumerate(curves.items())
        ],
        layout={
            "hovermode": "x unified",
            "margin": {"t": 58},
            "xaxis": {
                "title": {"text": "after task"},
                "tick0": 1,
                "dtick": max(1, len(tasks) // 10),
                "showgrid": False,
            },
            "yaxis": {"tickformat": ".0%", "range": [min(0.0, lowest) - 0.02, 1.03]},
        },
        height=max(220, min(90 + 56 * len(tasks), 560)),
        numbers=folded(
            "Numbers",
            table(
                ["after task", *curves],
                [
                    [
                        t,
                        *(
                            percent(values[t - 1]) if t <= len(values) else percent(None)
                            for values in curves.values()
                        ),
                    ]
                    for t in tasks
                ],
                "l" + "r" * len(curves),
                "Accuracy and forgetting over tasks",
            ),
            len(tasks),
        ),
    )


def epsilon_by_site(epsilon: Epsilon) -> Figure:
    """What each site's releases have cost it."""
    title = label(f"ε for one {epsilon.unit}, δ = {power(epsilon.delta)}", 60)
    spent = {site: math.inf if value is None else value for site, value in epsilon.per_site.items()}
    data, layout, height = bars_by_name(spent, title, ".3~g")
    numbers = table(
        ["site", "ε", "unit"],
        [[site, decimal(value), epsilon.unit] for site, value in epsilon.per_site.items()],
        "lrl",
        "Epsilon of each site",
    )
    return Figure(
        "epsilon",
        "Privacy loss at each site",
        f"Epsilon for one {epsilon.unit}; smaller is more private, and the worst site counts.",
        data,
        layout,
        height,
        wide=True,
        numbers=folded("Numbers", numbers, len(epsilon.per_site)),
    )
