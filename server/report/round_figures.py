"""The charts of a report over rounds, as plotly's JSON: learning, participation, traffic and time."""

from collections.abc import Sequence
from typing import Any

from perennial.server.report.markup import (
    Figure,
    Markup,
    decimal,
    duration,
    folded,
    label,
    percent,
    plural,
    size,
    size_unit,
    table,
)
from perennial.server.report.task_figures import named_axis
from perennial.server.run_record import RoundEvent, Run

PARTICIPATION = (
    ("not asked", "var(--idle)"),
    ("absent", "var(--away)"),
    ("refused", "var(--under)"),
    ("reply dropped", "var(--c2)"),
    ("took part", "var(--joined)"),
)


def _task_bands(rounds: Sequence[RoundEvent]) -> dict[str, Any]:
    """Layout that shades every other task and names each over the plot."""
    spans: dict[int, list[int]] = {}
    for event in rounds:
        spans.setdefault(event.task, []).append(event.round)
    words = "task {}" if len(spans) <= 6 else "{}"
    return {
        "margin": {"t": 24},
        "xaxis": {
            "title": {"text": "round"},
            "showgrid": False,
            "range": [rounds[0].round - 0.5, rounds[-1].round + 0.5],
        },
        "shapes": [
            {
                "type": "rect",
                "xref": "x",
                "yref": "paper",
                "x0": min(numbers) - 0.5,
                "x1": max(numbers) + 0.5,
                "y0": 0,
                "y1": 1,
                "fillcolor": "var(--band)",
                "line": {"width": 0},
                "layer": "below",
            }
            for index, numbers in enumerate(spans.values())
            if index % 2 == 0
        ],
        "annotations": [
            {
                "text": words.format(task),
                "xref": "x",
                "yref": "paper",
                "x": (min(numbers) + max(numbers)) / 2,
                "y": 1,
                "yanchor": "bottom",
                "showarrow": False,
                "font": {"size": 11, "color": "var(--quiet)"},
            }
            for task, numbers in spans.items()
            if len(spans) <= 20
        ],
    }


def _line_by_round(run: Run, name: str, values: Sequence[float | None], number_format: str) -> dict[str, Any]:
    dense = len(values) > 60
    return {
        "type": "scatter",
        "mode": "lines" if dense else "lines+markers",
        "name": name,
        "x": [event.round for event in run.rounds],
        "y": list(values),
        "hovertemplate": f"round %{{x}}: %{{y:{number_format}}}<extra></extra>",
        "line": {"width": 2, "color": "var(--c1)"},
        "marker": {"size": 6, "color": "var(--c1)"},
        "connectgaps": True,
    }


def accuracy_by_round(run: Run) -> Figure:
    """Accuracy on all classes so far, at the rounds where it was measured."""
    data = [_line_by_round(run, "accuracy", [event.accuracy for event in run.rounds], ".1%")]
    layout = _task_bands(run.rounds) | {"yaxis": {"tickformat": ".0%", "range": [0, 1.03]}}
    return Figure(
        "accuracy-by-round",
        "Accuracy in each round",
        "On all classes so far. It drops where a task brings new classes and recovers as they are learned.",
        data,
        layout,
        height=300,
        wide=True,
    )


def train_loss(run: Run) -> Figure:
    """Mean training loss of the sites in each round."""
    data = [_line_by_round(run, "training loss", [event.train_loss for event in run.rounds], ".4g")]
    layout = _task_bands(run.rounds) | {"yaxis": {"rangemode": "tozero"}}
    description = "Mean over the sites that took part; new classes raise it at the start of a task."
    return Figure(
        "train-loss", "Training loss in each round", description, data, layout, height=300, wide=True
    )


def participation(run: Run, sites: Sequence[str]) -> Figure:
    """Who took part in which round, and what became of the others."""
    position = {site: row for row, site in enumerate(sites)}
    grid = [[0] * len(run.rounds) for _ in sites]
    reasons = [[""] * len(run.rounds) for _ in sites]
    for column, event in enumerate(run.rounds):
        for site in event.participants:
            grid[position[site]][column] = 4
        for site in event.absent:
            grid[position[site]][column] = 1
        for code, entries in ((2, event.refused), (3, event.dropped)):
            for entry in entries:
                grid[position[entry.site]][column] = code
                reasons[position[entry.site]][column] = f": {label(entry.reason, 80)}"
    present = sorted({code for row in grid for code in row}, reverse=True)
    cells = {
        "type": "heatmap",
        "x": [event.round for event in run.rounds],
        "y": list(range(len(sites))),
        "z": grid,
        "customdata": [
            [PARTICIPATION[code][0] + reason for code, reason in zip(codes, row, strict=True)]
            for codes, row in zip(grid, reasons, strict=True)
        ],
        "hovertemplate": "%{y}, round %{x}<br>%{customdata}<extra></extra>",
        "colorscale": [
            [edge / 5, colour] for code, (_, colour) in enumerate(PARTICIPATION) for edge in (code, code + 1)
        ],
        "zmin": -0.5,
        "zmax": 4.5,
        "showscale": False,
        "xgap": 2 if len(run.rounds) <= 100 else 0,
        "ygap": 2 if len(sites) <= 60 else 0,
    }
    legend = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [None],
            "y": [None],
            "name": PARTICIPATION[code][0],
            "marker": {"symbol": "square", "size": 11, "color": PARTICIPATION[code][1]},
        }
        for code in present
    ]
    return Figure(
        name="participation",
        title="Participation",
        description="One row for each site, one column for each round.",
        data=[cells, *legend],
        layout={
            "margin": {"t": 40},
            "legend": {"itemclick": False, "itemdoubleclick": False},
            "showlegend": True,
            "xaxis": {"title": {"text": "round"}, "showgrid": False},
            "yaxis": named_axis(sites, autorange="reversed", showgrid=False, showticklabels=len(sites) <= 60),
        },
        height=120 + len(sites) * (26 if len(sites) <= 20 else 14 if len(sites) <= 60 else 6),
        wide=True,
    )


def traffic(run: Run) -> Figure:
    """Bytes from and to the sites in each round; the text has those of the ends of tasks too."""
    largest = max(max(event.bytes_up, event.bytes_down) for event in run.rounds)
    unit, factor = size_unit(largest)
    directions = (
        ("from the sites", "var(--c1)", [event.bytes_up for event in run.rounds]),
        ("to the sites", "var(--c6)", [event.bytes_down for event in run.rounds]),
    )
    summary = run.summary
    description = (
        f"In the rounds, {size(summary.bytes_up)} from the sites and {size(summary.bytes_down)} to them"
    )
    if summary.task_end_bytes_up is not None and summary.task_end_bytes_down is not None:
        up, down = size(summary.task_end_bytes_up), size(summary.task_end_bytes_down)
        description += f"; at the ends of tasks, {up} and {down} more"
    layout = _task_bands(run.rounds)
    layout |= {"barmode": "group", "bargap": 0.2, "margin": {"t": 48}, "hovermode": "x unified"}
    layout |= {"yaxis": {"title": {"text": unit}, "rangemode": "tozero"}}
    return Figure(
        name="traffic",
        title="Traffic in each round",
        description=f"{description}. Model and method tensors alone, without what carries them.",
        data=[
            {
                "type": "bar",
                "name": name,
                "x": [event.round for event in run.rounds],
                "y": [count / factor for count in counts],
                "marker": {"color": colour},
                "hovertemplate": f"%{{y:.4g}} {unit}",
            }
            for name, colour, counts in directions
        ],
        layout=layout,
        height=320,
    )


def time_by_round(run: Run) -> Figure:
    """Seconds of each round."""
    known = sorted(event.seconds for event in run.rounds if event.seconds is not None)
    median = f"Half of the rounds took under {duration(known[len(known) // 2])}. " if known else ""
    layout = _task_bands(run.rounds)
    layout |= {"margin": {"t": 48}, "yaxis": {"title": {"text": "seconds"}, "rangemode": "tozero"}}
    return Figure(
        name="time",
        title="Time in each round",
        description=f"{median}The whole run took {duration(run.summary.seconds)}.",
        data=[
            {
                "type": "bar",
                "x": [event.round for event in run.rounds],
                "y": [event.seconds for event in run.rounds],
                "marker": {"color": "var(--c1)"},
                "hovertemplate": "round %{x}: %{y:.3g} s<extra></extra>",
            }
        ],
        layout=layout,
        height=320,
    )


def rounds_table(run: Run) -> Markup:
    """The numbers behind every chart over rounds."""
    rows = [
        [
            event.round,
            event.task,
            len(event.participants),
            "skipped" if event.skipped else "",
            decimal(event.train_loss, 4),
            percent(event.accuracy),
            size(event.bytes_up),
            size(event.bytes_down),
            decimal(event.seconds),
        ]
        for event in run.rounds
    ]
    columns = ["round", "task", "sites", "", "training loss", "accuracy", "up", "down", "seconds"]
    numbers = table(columns, rows, "lrrlrrrrr", "Rounds")
    return folded(f"All {plural(len(rows), 'round')} in numbers", numbers, len(rows))
