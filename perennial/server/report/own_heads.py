"""The section on what each hospital gains by taking part: its own, the federated and its personal head."""

from pydantic import BaseModel, ConfigDict, Field

from perennial.server.measures.figure import wilson
from perennial.server.report.markup import MISSING, Section, element, join, table
from perennial.server.report.sections import panel

NOTE = (
    "On each hospital's own test records, which no head has seen, with 95 % intervals of the share of right "
    "answers. Own: from its records alone. Federated: the model of this run. Personal: begins at the "
    "federated head and is fitted to the hospital's own records as far as its validation records say that "
    "this helps; `predict RUN DATA --site NAME` uses it. It is kept at the hospital and is no part of an "
    "export. Few test records say little: the intervals show how little."
)


class OwnHead(BaseModel):
    """One site's block: right answers of each head by class, of `total` test records."""

    model_config = ConfigDict(frozen=True)
    penalty: float | None = Field(alias="lambda")
    train: int
    validation: int
    total: list[int]
    right: dict[str, list[int]]
    missing: list[str] = []

    def balanced(self, head: str) -> float | None:
        """Mean over the classes that the test records have of the share of right answers."""
        shares = [right / n for right, n in zip(self.right[head], self.total, strict=True) if n]
        return sum(shares) / len(shares) if shares else None


SELDOMER = 0.03
"""Balanced accuracy by which a personal head may lag behind before the page says so."""
HEADS = ("own", "federated", "personal")


def section(found: dict[str, OwnHead], classes: list[str]) -> Section:
    """The section on hospitals' own heads. classes: names, by label."""
    rows, said = [], []
    for site, each in found.items():
        records, cells = sum(each.total), list[str]()
        for head in HEADS:
            share, balanced = wilson(sum(each.right[head]), records), each.balanced(head)
            plain = MISSING if share.value is None else f"{100 * share.value:.1f} {share.interval(100, 0)}"
            cells += [plain, MISSING if balanced is None else f"{100 * balanced:.1f}"]
        chosen = "federated" if each.penalty is None else "own" if each.penalty == 0 else f"{each.penalty:g}"
        rows.append([site, str(each.train), str(records), *cells, chosen])
        said += _sentences(site, each, classes)
    columns = ["hospital", "trains with", "tested on"]
    columns += [f"{head}, {figure}" for head in HEADS for figure in ("%", "balanced %")] + ["lambda"]
    shown = table(columns, rows, "lrrrrrrrrl", "Own, federated and personal heads")
    words = join([element("p", text) for text in said])
    return Section("Each hospital on its own patients", [panel("Heads", shown, long=True), words], NOTE)


def _sentences(site: str, each: OwnHead, classes: list[str]) -> list[str]:
    own, federated = sum(each.right["own"]), sum(each.right["federated"])
    said = []
    if federated < own:
        said.append(
            f"{site}: of {sum(each.total)} records the federated model gets {own - federated} fewer right "
            "than the hospital's own model."
        )
    found, kept = each.balanced("personal"), each.balanced("federated")
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
