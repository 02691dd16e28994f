"""compare.html: experiments side by side, the table and the plot that a paper would print."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from perennial.foundation.errors import StateError
from perennial.foundation.files import replace_file
from perennial.server.charts.curves import Curve, Curves
from perennial.server.charts.frame import SHARES, Axis, after_tasks
from perennial.server.report.comparison import Comparison, Row, Spread, compared
from perennial.server.report.markup import (
    MISSING,
    Picture,
    Section,
    element,
    join,
    numbers,
    panel,
    percent,
    plural,
    table,
)
from perennial.server.report.method_blocks import section_of
from perennial.server.report.page import page
from perennial.server.run_record import Measured, Run, read_run

NOTHING = Spread(None, None)
_OWN = TypeAdapter(dict[str, list[Measured]])


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
    best, first = rows[0], comparison.measures[0]
    seeds = plural(len(best.runs), "seed")
    story = f"Best {first}: {best.experiment}, {best.spread(first)} % over {seeds}."
    if best.spread(first).mean is None:
        story = f"No run measured its {first}."
    elif comparison.unlike:
        story = "Not all experiments were measured on the same data, so none of them is called the best."
    listed = join([element("li", fact) for fact in facts])
    header = join([element("ul", listed, "facts"), element("p", story, "story")])
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
    at_sites = _site_figure(rows)
    sections = [
        Section("Results", parts),
        Section("Accuracy over tasks", [_curves(rows)]),
        *([Section("Sites", [at_sites])] if at_sites is not None else []),
        *(
            replace(section, title=f"Sites of {run.folder.name}")
            for row in rows
            for run in row.runs.values()
            if (section := section_of(run, "cross_site")) is not None
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
                (task, max(0.0, spread.mean - spread.deviation), min(1.0, spread.mean + spread.deviation))
                for task, spread in enumerate(row.over_tasks, 1)
                if spread.mean is not None and spread.deviation is not None
            ],
        )
        for row in rows
    ]
    longest = max(len(row.over_tasks) for row in rows)
    columns = ["experiment", *[f"task {t}" for t in range(1, longest + 1)]]
    cells = [
        [row.experiment, *map(str, row.over_tasks), *[MISSING] * (longest - len(row.over_tasks))]
        for row in rows
    ]
    return Picture(
        name="accuracy-over-tasks",
        title="Accuracy on all classes so far",
        description="Mean over seeds after each task; the band is one standard deviation to either side.",
        chart=Curves(curves, after_tasks(longest), SHARES, 440, together=True, place="after task"),
        wide=True,
        numbers=numbers(columns, cells, "Accuracy over tasks, percent"),
    )


def _site_figure(rows: Sequence[Row]) -> Picture | None:
    """Accuracy at each site under each experiment: of the site's own model, or else of the global one.

    None where no run has own models. Raises StateError on a run whose block is malformed.
    """
    own = [any("personalised_accuracy" in run.blocks for run in row.runs.values()) for row in rows]
    if not any(own):
        return None
    suffixes = ["" if has else ", global model" for has in own]
    names = [row.experiment + suffix for row, suffix in zip(rows, suffixes, strict=True)]
    by_row = [_by_site(row) for row in rows]
    sites = sorted({site for spreads in by_row for site in spreads})
    lines = [[spreads.get(site, NOTHING) for site in sites] for spreads in by_row]
    curves = [
        Curve(
            name,
            [(place, spread.mean) for place, spread in enumerate(line)],
            [f"{spread} %" for spread in line],
            joined=False,
        )
        for name, line in zip(names, lines, strict=True)
    ]
    cells = [[name, *map(str, line)] for name, line in zip(names, lines, strict=True)]
    return Picture(
        name="accuracy-at-sites",
        title="Accuracy at each site",
        description="On what the site held out, after the last task: mean over seeds of its own model.",
        chart=Curves(curves, Axis(names=sites), SHARES, 440, together=True),
        wide=True,
        numbers=numbers(["experiment", *sites], cells, "Accuracy at each site, percent"),
    )


def _by_site(row: Row) -> dict[str, Spread]:
    values: dict[str, list[float | None]] = {}
    for run in row.runs.values():
        for site, accuracy in _at_sites(run).items():
            values.setdefault(site, []).append(accuracy)
    return {site: Spread.of(over_seeds) for site, over_seeds in values.items()}


def _at_sites(run: Run) -> dict[str, float | None]:
    block = run.blocks.get("personalised_accuracy")
    if block is None:
        return {site: entry.accuracy for site, entry in run.summary.sites.items()}
    try:
        own = _OWN.validate_python(block)
    except ValidationError as error:
        raise StateError(
            f"{run.folder}: summary.json: personalised_accuracy: {error.errors()[0]['msg']}; allowed: a list "
            "of accuracies for each site"
        ) from None
    return {site: accuracies[-1] if accuracies else None for site, accuracies in own.items()}
