"""Sections of a report on closed-form runs: choices, sites beside each other, and hospitals' own heads."""

from pydantic import BaseModel, ConfigDict, Field

from perennial.server.charts.curves import HeatMap
from perennial.server.measures.record import compute_wilson_interval
from perennial.server.report.markup import (
    MISSING,
    Markup,
    Picture,
    Section,
    build_element,
    build_numbers_table,
    build_panel,
    build_table,
    format_decimal,
    format_percent,
    join,
)
from perennial.server.run_record import Run

MOST = 40
"""Rows and columns of a heat map that can be read."""
CROSS_SITE = (
    "What the sums that sites sent anyway say of each other; no site was asked anything for it. Skill: how "
    "much better than a guess by frequency the other sites' model fits a site's records. Benefit: what a "
    "site's records gain another one, out of sample, as a share of that one's error. Nothing is left out by "
    "itself. A site that is marked most often has another camera, other habits of labelling, or classes that "
    "are rare elsewhere; a fault or false sums look the same here. Talk to it; its sums can be withdrawn at "
    "any time."
)


OWN_HEADS = (
    "On each hospital's own test records, which no head has seen, with 95 % intervals of the share of right "
    "answers. Own: from its records alone. Federated: the model of this run. Personal: begins at the "
    "federated head and is fitted to the hospital's own records as far as its validation records say that "
    "this helps; `predict RUN DATA --site NAME` uses it. It is kept at the hospital and is no part of an "
    "export. Few test records say little: the intervals show how little."
)


class Tried(BaseModel):
    """A head with the best shrinkage that was tried, and its value on validation samples."""

    maps: list[str]
    head: str
    shrinkage: float
    value: float
    interval: tuple[float, float]
    end_of_grid: bool


def show_map_choice(tried: list[Tried], run: Run) -> Section:
    """The section on the choice of a feature map: the best head on each in task 1, the chosen first."""
    note = (
        "Compared in the first task, each alone, by the validation samples of its classes; the run goes on "
        "with the first. Where intervals overlap another could be as good."
    )
    return Section("The maps to choose among", [_build_heads_table(tried)], note)


def show_head_choice(tried: list[Tried], run: Run) -> Section:
    """The section on what head auto chose among in the last task, the chosen one first."""
    note = (
        "The first was chosen. Each is judged with its neighbours in shrinkage, so that the order need not "
        "be that of the figures. These are of the validation samples that chose, with 95 % intervals: the "
        "chosen one is judged too well, and where intervals overlap another could be as good."
    )
    return Section("The head that was chosen", [_build_heads_table(tried)], note)


def _build_heads_table(tried: list[Tried]) -> Markup:
    rows = [
        [
            " and ".join(each.maps),
            each.head,
            f"{each.shrinkage:g}" + (" (end of those tried)" if each.end_of_grid else ""),
            format_percent(each.value) + " [{}, {}]".format(*map(format_percent, each.interval)),
        ]
        for each in tried
    ]
    columns = ["features", "head", "shrinkage", "on validation samples"]
    return build_panel("Compared", build_table(columns, rows, "lllr", "Compared"), long=True)


class Row(BaseModel):
    """One site, judged by heads of the other sites' sums."""

    model_config = ConfigDict(frozen=True)
    apart: float | None = None
    skill: float | None = None
    given: float | None = None
    marked: str | None = None
    benefit: dict[str, float] = {}


class Table(BaseModel):
    """The cross-site block of summary.json."""

    model_config = ConfigDict(frozen=True)
    features: int
    sites: dict[str, Row]


def show_cross_site(found: Table, run: Run) -> Section:
    """The section on how sites' sums fit each other: who gains from whom, and a sentence for each site."""
    sites = list(found.sites)[:MOST]
    values = [[found.sites[row].benefit.get(column) for column in sites] for row in sites]
    words_of = [[format_decimal(value) for value in row] for row in values]
    largest = max((abs(value) for row in values for value in row if value is not None), default=1.0)
    chart = HeatMap(
        sites,
        sites,
        [[None if value is None else (value + largest) / 2 for value in row] for row in values],
        [["" if value is None else f"{value:.2f}" for value in row] for row in values],
        lambda row, column: f"{sites[row]}, {sites[column]}: {words_of[row][column]}",
        largest or 1.0,
        min(120 + 26 * len(sites), 1200),
    )
    figure = Picture(
        "cross-site-benefit",
        "Who gains from whom",
        "Each row is a site; each column, the gain that this site's records bring it, as a share of its "
        "error. The darkest cell gains most, the lightest costs most.",
        chart,
        wide=True,
        numbers=build_numbers_table(
            ["site", *sites], [[sites[i], *row] for i, row in enumerate(words_of)], "Gains"
        ),
    )
    said = [build_element("p", describe_site(name, row)) for name, row in found.sites.items()]
    return Section("Sites beside each other", [figure, join(said)], CROSS_SITE)


def describe_site(name: str, row: Row) -> str:
    """A sentence on what is remarkable about one site."""
    if row.skill is None:
        said = "shares too few classes with the others to be judged by them"
    else:
        said = f"is fitted by the others' model with skill {format_decimal(row.skill)}"
    if row.benefit:
        best = max(row.benefit, key=lambda other: row.benefit[other])
        if row.benefit[best] > 0:
            said += f", and gains most from {best} ({100 * row.benefit[best]:+.0f} % of its error)"
    if row.given is not None:
        said += f"; its own records gain the others {100 * row.given:+.0f} % in the median"
    marked = f" Marked: {row.marked}." if row.marked else ""
    return f"{name} {said}.{marked}"


class OwnHead(BaseModel):
    """One site's block: right answers of each head by class, of `total` test records."""

    model_config = ConfigDict(frozen=True)
    penalty: float | None = Field(alias="lambda")
    train: int
    validation: int
    total: list[int]
    right: dict[str, list[int]]
    missing: list[str] = []

    def compute_balanced_accuracy(self, head: str) -> float | None:
        """Mean over the classes that the test records have of the share of right answers."""
        shares = [right / n for right, n in zip(self.right[head], self.total, strict=True) if n]
        return sum(shares) / len(shares) if shares else None


SELDOMER = 0.03
"""Balanced accuracy by which a personal head may lag behind before the page says so."""
HEADS = ("own", "federated", "personal")


def show_own_heads(found: dict[str, OwnHead], run: Run) -> Section:
    """The section on hospitals' own heads."""
    rows, said = [], []
    for site, each in found.items():
        records, cells = sum(each.total), list[str]()
        for head in HEADS:
            share, balanced = (
                compute_wilson_interval(sum(each.right[head]), records),
                each.compute_balanced_accuracy(head),
            )
            plain = MISSING if share.value is None else f"{100 * share.value:.1f} {share.interval(100, 0)}"
            cells += [plain, MISSING if balanced is None else f"{100 * balanced:.1f}"]
        chosen = "federated" if each.penalty is None else "own" if each.penalty == 0 else f"{each.penalty:g}"
        rows.append([site, str(each.train), str(records), *cells, chosen])
        said += _describe_head(site, each, run.summary.classes)
    columns = ["hospital", "trains with", "tested on"]
    columns += [f"{head}, {figure}" for head in HEADS for figure in ("%", "balanced %")] + ["lambda"]
    shown = build_table(columns, rows, "lrrrrrrrrl", "Own, federated and personal heads")
    words = join([build_element("p", text) for text in said])
    return Section(
        "Each hospital on its own patients", [build_panel("Heads", shown, long=True), words], OWN_HEADS
    )


def _describe_head(site: str, each: OwnHead, classes: list[str]) -> list[str]:
    own, federated = sum(each.right["own"]), sum(each.right["federated"])
    said = []
    if federated < own:
        said.append(
            f"{site}: of {sum(each.total)} records the federated model gets {own - federated} fewer right "
            "than the hospital's own model."
        )
    found, kept = each.compute_balanced_accuracy("personal"), each.compute_balanced_accuracy("federated")
    if found is not None and kept is not None and found < kept - SELDOMER:
        said.append(
            f"{site}: the personal head follows the hospital's own class frequencies and finds rare classes "
            f"less often: {100 * found:.0f} % in the mean over classes, the federated model "
            f"{100 * kept:.0f} %. Where rare classes matter most, use the federated model."
        )
    for name in each.missing:
        label = classes.index(name) if name in classes else -1
        if label >= 0 and each.total[label]:
            right = each.right["personal"][label]
            said.append(
                f"{site} trains with no {name}; its personal head keeps the federated row for it and finds "
                f"{right} of {each.total[label]}."
            )
    return said
