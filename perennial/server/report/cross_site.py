"""The section on how sites' sums fit each other: two heat maps, and one sentence for each site."""

from pydantic import BaseModel, ConfigDict

from perennial.server.charts.cells import HeatMap
from perennial.server.report.markup import MISSING, Picture, Section, decimal, element, join, numbers

MOST = 40
"""Rows and columns of a heat map that can be read."""
LEAD = (
    "What the sums that sites sent anyway say of each other; no site was asked anything for it. Skill: how "
    "much better than a guess by frequency the other sites' model fits a site's records. Benefit: what a "
    "site's records gain another one, out of sample, as a share of that one's error. Nothing is left out by "
    "itself. A site that is marked most often has another camera, other habits of labelling, or classes that "
    "are rare elsewhere; a fault or false sums look the same here. Talk to it; its sums can be withdrawn at "
    "any time."
)


class Apart(BaseModel):
    """How far a site's records of a class lie from the other sites', in the median."""

    model_config = ConfigDict(frozen=True)
    t: float
    effect: float


class Row(BaseModel):
    """One site, judged by heads of the other sites' sums."""

    model_config = ConfigDict(frozen=True)
    apart: float | None = None
    skill: float | None = None
    given: float | None = None
    marked: str | None = None
    benefit: dict[str, float] = {}
    classes: dict[str, Apart] = {}


class Table(BaseModel):
    """The cross-site block of summary.json."""

    model_config = ConfigDict(frozen=True)
    features: int
    sites: dict[str, Row]


def section(found: Table, classes: list[str]) -> Section:
    """The section on a cross-site table. classes: names, by label."""
    sites = list(found.sites)[:MOST]
    figures = [_benefits(found, sites)]
    if any(row.classes for row in found.sites.values()):
        figures.append(_differences(found, sites, classes))
    words = join([element("p", sentence(name, row, classes)) for name, row in found.sites.items()])
    return Section("Sites beside each other", [*figures, words], LEAD)


def sentence(name: str, row: Row, classes: list[str]) -> str:
    """A sentence on what is remarkable about one site."""
    if row.skill is None:
        said = "shares too few classes with the others to be judged by them"
    else:
        said = f"is fitted by the others' model with skill {decimal(row.skill)}"
    if row.benefit:
        best = max(row.benefit, key=lambda other: row.benefit[other])
        if row.benefit[best] > 0:
            said += f", and gains most from {best} ({100 * row.benefit[best]:+.0f} % of its error)"
    if row.given is not None:
        said += f"; its own records gain the others {100 * row.given:+.0f} % in the median"
    if row.classes:
        label, apart = max(row.classes.items(), key=lambda item: item[1].effect)
        if apart.effect > 0:
            said += (
                f"; its {_name(label, classes)} lies furthest from the others' (effect {apart.effect:.2f})"
            )
    marked = f" Marked: {row.marked}." if row.marked else ""
    return f"{name} {said}.{marked}"


def _name(label: str, classes: list[str]) -> str:
    return classes[int(label)] if label.isdigit() and int(label) < len(classes) else f"class {label}"


def _benefits(found: Table, sites: list[str]) -> Picture:
    values = [[found.sites[row].benefit.get(column) for column in sites] for row in sites]
    largest = max((abs(v) for row in values for v in row if v is not None), default=1.0)
    return _map(
        "cross-site-benefit",
        "Who gains from whom",
        "Each row is a site; each column, what that site's records gain for it, as a share of its error. The "
        "darkest cell gains most, the lightest costs most.",
        sites,
        sites,
        values,
        [[None if v is None else (v + largest) / 2 for v in row] for row in values],
        largest,
    )


def _differences(found: Table, sites: list[str], classes: list[str]) -> Picture:
    labels = sorted({label for row in found.sites.values() for label in row.classes}, key=int)[:MOST]
    values = [
        [None if (a := found.sites[site].classes.get(label)) is None else a.effect for label in labels]
        for site in sites
    ]
    largest = max((v for row in values for v in row if v is not None), default=1.0)
    return _map(
        "cross-site-classes",
        "How far a class differs from the other sites'",
        "In within-class deviations per direction, the median over the other sites; 0 where nothing beyond "
        "chance is seen. Several records of one patient make it larger.",
        sites,
        [_name(label, classes) for label in labels],
        values,
        values,
        largest,
    )


def _map(
    key: str,
    title: str,
    words: str,
    rows: list[str],
    columns: list[str],
    values: list[list[float | None]],
    shades: list[list[float | None]],
    largest: float,
) -> Picture:
    words_of = [[MISSING if v is None else decimal(v) for v in row] for row in values]
    texts = [["" if v is None else f"{v:.2f}" for v in row] for row in values]
    tells = [
        [f"{row}, {column}: {said}" for column, said in zip(columns, own, strict=True)]
        for row, own in zip(rows, words_of, strict=True)
    ]
    height = min(120 + 26 * len(rows), 1200)
    cells = [[row, *own] for row, own in zip(rows, words_of, strict=True)]
    chart = HeatMap(rows, columns, shades, texts, tells, largest or 1.0, height)
    return Picture(key, title, words, chart, wide=True, numbers=numbers(["site", *columns], cells, title))
