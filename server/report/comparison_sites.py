"""How experiments compare at each site, where one of them gives sites models of their own."""

from collections.abc import Sequence

from pydantic import TypeAdapter, ValidationError

from perennial.foundation.errors import StateError
from perennial.server.charts.curves import Curve, Curves
from perennial.server.charts.frame import Axis
from perennial.server.report.comparison import Row, Spread
from perennial.server.report.markup import Picture, folded, table
from perennial.server.report.task_figures import SHARES
from perennial.server.run_record import Measured, Run

NOTHING = Spread(None, None)
_OWN = TypeAdapter(dict[str, list[Measured]])


def site_figure(rows: Sequence[Row]) -> Picture | None:
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
    numbers = table(["experiment", *sites], cells, "l" + "r" * len(sites), "Accuracy at each site, percent")
    return Picture(
        name="accuracy-at-sites",
        title="Accuracy at each site",
        description="On what the site held out, after the last task: mean over seeds of its own model.",
        chart=Curves(curves, Axis(names=sites), SHARES, 440, together=True),
        wide=True,
        numbers=folded("Numbers", numbers, len(rows)),
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
