"""compare.html: experiments side by side, the table and the plot that a paper would print."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from perennial.foundation.files import replace_file
from perennial.server.charts.curves import Curve, Curves
from perennial.server.report.comparison import Comparison, Row, compared
from perennial.server.report.comparison_sites import site_figure
from perennial.server.report.markup import (
    MISSING,
    Picture,
    Section,
    element,
    folded,
    join,
    percent,
    plural,
    table,
)
from perennial.server.report.method_blocks import beside_each_other
from perennial.server.report.page import page
from perennial.server.report.sections import panel
from perennial.server.report.task_figures import SHARES, after_tasks
from perennial.server.run_record import read_run


def compare(run_folders: Sequence[Path], output: Path) -> Comparison:
    """Compare runs and write the page; as text, the result is the table in Markdown.

    output: the page, or an existing folder in which it is called compare.html.
    Raises StateError when a run is missing or damaged, or when two runs share experiment, settings and seed.
    """
    path = output / "compare.html" if output.is_dir() else output
    comparison = compared([read_run(folder) for folder in run_folders], path)
    replace_file(path, _page(comparison))
    return comparison


def _page(comparison: Comparison) -> bytes:
    rows = comparison.rows
    runs = sum(len(row.runs) for row in rows)
    facts = [plural(len(rows), "experiment"), plural(runs, "run")]
    best = rows[0]
    first = comparison.measures[0]
    story = f"Best {first}: {best.experiment}, {best.spread(first)} % over "
    story += f"{plural(len(best.runs), 'seed')}."
    if best.spread(first).mean is None:
        story = f"No run measured its {first}."
    elif not comparison.comparable:
        story = "Not all experiments were measured on the same data, so none of them is called the best."
    header = join(
        [
            element("ul", join([element("li", fact) for fact in facts]), "facts"),
            element("p", story, "story"),
        ]
    )
    columns, cells = comparison.cells()
    note = (
        "Shares in percent, forgetting and backward transfer in points; mean ± standard deviation over seeds."
    )
    parts = [panel("Mean over seeds", table(columns, cells, "lr" + "r" * len(columns[2:]), "Results"), note)]
    if comparison.differences:
        claims = table(*comparison.claims(), "llrr", "Paired differences")
        note = "Over the seeds that both have, seed by seed. This is a count, not a significance test."
        parts.append(panel("Who is better", claims, note))
    if comparison.unlike:
        reasons = table(*comparison.reasons(), "lll", "Pairs that are not compared")
        note = "Figures of different data stand side by side above; a difference between them says nothing."
        parts.append(panel("Not compared", reasons, note, long=True))
    sources = [
        [row.experiment, str(seed), run.folder.name, percent(run.summary.final_accuracy)]
        for row in rows
        for seed, run in row.runs.items()
    ]
    names = ["experiment", "seed", "run", "final accuracy"]
    at_sites = site_figure(rows)
    sections = [
        Section("Results", parts),
        Section("Accuracy over tasks", [_curves(rows)]),
        *([Section("Sites", [at_sites])] if at_sites is not None else []),
        *(
            replace(beside_each_other(run.blocks["cross_site"], run), title=f"Sites of {run.folder.name}")
            for row in rows
            for run in row.runs.values()
            if run.blocks.get("cross_site")
        ),
        Section("Runs", [panel("What was compared", table(names, sources, "lrlr", "Runs"), long=True)]),
    ]
    footer = element("p", "Written by `perennial compare`. This page loads nothing from anywhere.")
    return page("Comparison", "Perennial comparison", header, sections, footer)


def _curves(rows: Sequence[Row]) -> Picture:
    """One curve of means for each experiment, over the band of its deviation."""
    curves = [
        Curve(
            row.experiment,
            [(task, spread.mean) for task, spread in enumerate(row.over_tasks, 1)],
            [f"{spread} %" for spread in row.over_tasks],
            band=[
                (task, spread.mean - spread.deviation, spread.mean + spread.deviation)
                for task, spread in enumerate(row.over_tasks, 1)
                if spread.mean is not None and spread.deviation is not None
            ],
        )
        for row in rows
    ]
    longest = max(len(row.over_tasks) for row in rows)
    numbers = table(
        ["experiment", *[f"task {t}" for t in range(1, longest + 1)]],
        [
            [row.experiment, *map(str, row.over_tasks), *[MISSING] * (longest - len(row.over_tasks))]
            for row in rows
        ],
        "l" + "r" * longest,
        "Accuracy over tasks, percent",
    )
    return Picture(
        name="accuracy-over-tasks",
        title="Accuracy on all classes so far",
        description="Mean over seeds after each task; the band is one standard deviation to either side.",
        chart=Curves(curves, after_tasks(longest), SHARES, 440, together=True, place="after task"),
        wide=True,
        numbers=folded("Numbers", numbers, len(rows)),
    )
