"""The charts of a report over tasks and sites."""

import math
from collections.abc import Sequence

from perennial.server.charts.bars import NamedBars
from perennial.server.charts.cells import HeatMap
from perennial.server.charts.curves import Curve, Curves
from perennial.server.charts.frame import Axis
from perennial.server.metrics import forgetting
from perennial.server.report.markup import Picture, decimal, label, numbers, percent, power
from perennial.server.run_record import Epsilon, Run


def whole_percent(share: float) -> str:
    """The text of a tick on an axis of shares."""
    return percent(share, 0)


SHARES = Axis(low=0.0, high=1.03, words=whole_percent)
"""The upright axis of accuracies."""


def after_tasks(tasks: int) -> Axis:
    """The horizontal axis of charts over a run's tasks."""
    return Axis("after task", low=0.7, high=tasks + 0.3, words="{:.0f}".format, whole=True, grid=False)


def accuracy_matrix(run: Run) -> Picture:
    """Row t, column i: accuracy on task i after task t."""
    matrix = run.summary.accuracy_matrix
    count = len(matrix)
    tasks = [str(task) for task in range(1, count + 1)]
    padded = [[*row, *[None] * (count - len(row))] for row in matrix]
    digits = 1 if count <= 6 else 0
    texts = [["" if value is None else f"{100 * value:.{digits}f}" for value in row] for row in padded]
    tells = [
        [f"after {after}: {percent(value)} on task {task}" for task, value in enumerate(row, 1)]
        for after, row in enumerate(padded, 1)
    ]
    return Picture(
        name="accuracy-matrix",
        title="Accuracy matrix",
        description="Each row is the model after one task, each column how well it knows one task's classes.",
        chart=HeatMap(
            [f"after {t}" for t in tasks],
            tasks,
            padded,
            texts,
            tells,
            largest=1.0,
            height=max(220, min(90 + 56 * count, 560)),
            titles=("accuracy (%) on the classes of task", ""),
        ),
        numbers=numbers(
            ["after task", *[f"task {t}" for t in tasks]],
            [[t, *map(percent, row)] for t, row in zip(tasks, padded, strict=True)],
            "Accuracy matrix",
        ),
    )


def forgetting_after(matrix: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Forgetting after each task; None after the first, and where the matrix has holes."""
    return [forgetting(matrix[:tasks]) for tasks in range(1, len(matrix) + 1)]


def _intervals(run: Run) -> list[tuple[float, float] | None]:
    """The 95 % intervals of what the sites told, noise included."""
    known = zip(run.summary.federated_accuracy, run.summary.federated_interval, strict=False)
    return [None if a is None or ends is None else (ends[0], ends[1]) for a, ends in known]


def accuracy_over_tasks(run: Run) -> Picture:
    """Curves after each task: accuracy on all classes, on the newest task, at the sites, and forgetting."""
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
    return Picture(
        name="accuracy-over-tasks",
        title="Accuracy and forgetting over tasks",
        description="How much the model knows of everything so far and of the newest task, and how far "
        "earlier tasks have fallen from their best.",
        chart=Curves(
            [
                Curve(
                    name,
                    [*zip(tasks, values, strict=False)],
                    [percent(value) for value in values],
                    intervals=_intervals(run) if name == at_sites else (),
                )
                for name, values in curves.items()
            ],
            after_tasks(len(tasks)),
            Axis(low=min(0.0, lowest) - 0.02, high=1.03, words=whole_percent),
            height=max(220, min(90 + 56 * len(tasks), 560)),
            together=True,
            place="after task",
        ),
        numbers=numbers(
            ["after task", *curves],
            [
                [t, *(percent(values[t - 1] if t <= len(values) else None) for values in curves.values())]
                for t in tasks
            ],
            "Accuracy and forgetting over tasks",
        ),
    )


def epsilon_by_site(epsilon: Epsilon) -> Picture:
    """Bars of the epsilon that each site has spent."""
    title = label(f"ε for one {epsilon.unit}, δ = {power(epsilon.delta)}", 60)
    spent = {site: math.inf if value is None else value for site, value in epsilon.per_site.items()}
    rows = [[site, decimal(value), epsilon.unit] for site, value in epsilon.per_site.items()]
    return Picture(
        "epsilon",
        "Privacy loss at each site",
        f"Epsilon for one {epsilon.unit}; smaller is more private, and the worst site counts.",
        NamedBars(spent, Axis(title), decimal),
        wide=True,
        numbers=numbers(["site", "ε", "unit"], rows, "Epsilon of each site", "lrl"),
    )
