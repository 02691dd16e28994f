"""What the five papers claim, and what we saw: one line for each claim, over all tables that test it."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.paper_claims import Claim, Runs, Verdict

PAPERS: Mapping[str, str] = {
    "pp_fcil": "PP-FCIL",
    "feddig": "FedDig",
    "incre_fl": "Incre-FL",
    "fedperc": "FedPerC",
    "tricon_sf": "TriCon-SF",
}
"""Beginning of the names of a paper's tables, page and experiment, and what it is called."""
OURS = ("ours)", "as recommended here")
"""What claims say that are not the paper's."""
VARIANTS = ("pp_fcil_variants_digits",)
"""Tables of what papers leave open."""
SEEN = {"holds": "holds", "does not hold": "refuted", "undecided": "undecided", "not measured": "undecided"}


@dataclass(frozen=True)
class Untested:
    """A claim of a paper on which no table here has a test: what can be said of it, and why."""

    paper: str
    claim: str
    word: str
    why: str


_SIZE = "not judged"
_LARGE = "only a run of the paper's size can decide it: `{}`"
UNTESTED = (
    Untested("pp_fcil", "accuracies of tables 2 and 3", _SIZE, _LARGE.format("pp_fcil_cifar100")),
    Untested(
        "pp_fcil", "privacy costs 2 to 9 points (table 5)", _SIZE, "the paper gives no noise and no epsilon"
    ),
    Untested(
        *("pp_fcil", "above BiC, PODNet, DyTox and FedET (table 6)", _SIZE),
        "three are not federated, and the paper gives no protocol for any",
    ),
    Untested("feddig", "accuracies of table I", _SIZE, _LARGE.format("feddig_fashion_mnist_paper")),
    Untested(
        *("feddig", "its noise has epsilon 0.005", "refuted"),
        "by arithmetic: [its page](../../docs/methods/feddig.md#what-the-paper-gets-wrong)",
    ),
    Untested(
        *("incre_fl", "accuracies of tables 1 to 5", _SIZE),
        _LARGE.format("incre_fl_cifar100_10` and its like, `incre_fl_cifar10_2"),
    ),
    Untested("fedperc", "accuracies of tables III to VI", _SIZE, _LARGE.format("fedperc_cifar100_resnet34")),
    Untested("tricon_sf", "accuracies of table II", _SIZE, _LARGE.format("tricon_sf_ham10000_paper")),
    Untested(
        *("tricon_sf", "contribution values find who does not contribute (table IV)", _SIZE),
        "counted, not tested: [shares](tricon_sf_detection.md)",
    ),
    Untested(
        *("tricon_sf", "shuffled layers protect", "refuted"),
        "by attack: [security](tricon_sf_security.md)",
    ),
)
Tested = tuple[str, Claim, Runs, Verdict]
"""Table, claim, the runs of the table, and the verdict."""


def paper_of(table: str) -> str | None:
    """Beginning of a paper's names; None for a table of no paper."""
    if table in VARIANTS:
        return None
    return next((paper for paper in PAPERS if table.startswith(f"{paper}_")), None)


def claimed_by_paper(table: str, claim: Claim) -> str | None:
    """Beginning of the names of the paper that a claim is of; None for ours."""
    return None if any(word in claim.text for word in OURS) else paper_of(table)


def papers_table(tested: Sequence[Tested]) -> Iterator[str]:
    """As Markdown, line by line."""
    yield "| paper | claim | what we saw |"
    yield "| --- | --- | --- |"
    for paper, name in PAPERS.items():
        claims: dict[str, list[Tested]] = {}
        for each in tested:
            if claimed_by_paper(each[0], each[1]) == paper:
                claims.setdefault(each[1].text, []).append(each)
        link = f"[{name}](../../docs/methods/{paper}.md)"
        for text, those in claims.items():
            cells = "; ".join(_cell(*each) for each in those)
            yield f"| {link} | {text} | {cells} |"
        for each in UNTESTED:
            if each.paper == paper:
                yield f"| {link} | {each.claim} | **{each.word}**: {each.why} |"


def _cell(name: str, claim: Claim, runs: Runs, verdict: Verdict) -> str:
    figures = " against ".join(_mean(claim, row, runs) for row in (claim.better, claim.worse))
    shown = f" {figures}, {verdict.effect}, {verdict.seeds} seeds" if verdict.effect is not None else ""
    return f"**{SEEN[verdict.word]}** ([{name}]({name}.md){shown})"


def _mean(claim: Claim, row: str, runs: Runs) -> str:
    values = [100 * run["measures"][claim.measure] for run in runs if run["row"] == row]
    return f"{statistics.mean(values):.1f}" if values else "-"
