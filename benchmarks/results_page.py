"""The page of each table in `benchmarks/results/`, its picture, and the README.md there, which lists them.

`python -m benchmarks.results_page` writes them again. Figures stand on a table's own page alone;
the list has the verdict on each claim, because verdicts are corrected for the number of all claims. Nothing
is run here. A table appears with its figures once its result file has a run of the table as it is now; until
then, and while runs are missing, its page says so.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.chart import chart
from benchmarks.controls import controls_of
from benchmarks.grid import newest
from benchmarks.markdown import age, markdown, missing
from benchmarks.paper_claims import judge
from benchmarks.paper_tables import Tested, claimed_by_paper, papers_table
from benchmarks.table import RESULTS, ROOT, Table, tables

DOCS = ROOT / "docs"
PAGE = RESULTS / "README.md"
PICTURES = DOCS / "results"
HEAD = """# Results

Each table has a page of its own here, with figures, controls and a picture. This page has the verdict on each
claim. `python -m benchmarks` lists the tables, `python -m benchmarks TABLE` runs what a table lacks, and
`python -m benchmarks.results_page` writes all pages again.

Accuracies in per cent: mean over seeds and half the width of its 95 % t-interval. A claim is tested on the
difference between its two rows, taken seed by seed. It holds when the whole t-interval of the mean difference
is above the claim's margin, does not hold when the whole interval is below, and is undecided otherwise or
with fewer than five seeds. The intervals behind verdicts are widened for the number of claims of the same
paper (Holm's procedure at 5 %; claims of no paper are one family): the chance that any verdict of a family is
wrong is at most 5 %. The effect stands beside each verdict with its own 95 % interval, which is not widened.

Under a table stand its controls: what simple things reach on the same data. The untrained network is the
table's own before its first step. Joint training has all sites' data in one place, as many epochs as a site,
and its learning rate or a smaller one by validation samples; the best site alone is the one whose own model
has the highest figure on the test set. A row that does not beat the best of the first four controls is named
above its table. Forgetting is a task's best accuracy less its last, a mean over earlier tasks. "Paper" is the
paper's own figure, at the paper's own size, which is not ours.
"""

CHOICES = """## How settings were chosen

Since revision 2 of these results, settings are chosen on validation data of the sites and on seeds 11 to 20;
tables use others. `benchmarks/results/choices.md` shows the trials. These choices were made on test accuracy
or on seeds of the tables that show them, and still stand:

- FedDig: the server's learning rates and the spread of digests, on seeds of its tables.
- Incre-FL: lengths of training and the weights of its losses, on one seed of its tables.
- PP-FCIL on HAM10000: drawing, weights and learning rate on seeds 11 to 13; the nearest mean on the table's.
- Digits experiments: a cosine schedule of the learning rate was tried on the tables' seeds and taken back.
- Baselines of `rivals_digits`: the strength of each method, on one seed of the table.
- FedPerC: which layers make the sparsity vector, on seeds other than its tables' (`sparsity_vectors.md`).
- Noise on sums of CIFAR-100: 128 and 256 features were compared on test images, on seed 11.

Runs of averaging, and of methods above it, were once made with `bounds: {norm_multiple: 3}`, which was the
default then and is off now. They have been made again without it. Bounds never applied to sums of the
analytic classifier, to masked updates, or where the server adds noise. Records of programs that are gone
([PROGRAMS.md](PROGRAMS.md)) stand as they were.

Runs under a protection drew their noise from a seed; noise is drawn from the system now, with the same
distribution.
"""

PAPERS = """## What the five papers claim, and what we saw

Experiments as published, as far as the papers say what they did: `experiments/*_as_published.yaml`; what they
leave open or get wrong is on each method's page. Figures: the better row against the worse, then the mean of
the paired differences in points with its own 95 % interval. The verdict is corrected for the number of the
paper's claims. All figures are of small sizes; "not judged" says what a verdict would take.
`python -m benchmarks NAME --scale paper` starts a table of a paper's size, which wants a GPU.
"""


Measured = Mapping[str, Sequence[Mapping[str, Any]]]
"""Table -> its runs, which may be of an old revision."""


Present = Sequence[tuple[str, Table, Sequence[Mapping[str, Any]]]]
"""Name, table and runs of each table that has runs."""


def measured(results: Path = RESULTS) -> Measured:
    """What a folder of result files holds. Takes seconds: every row's experiment is read."""
    return {name: newest(table, results / f"{name}.jsonl") for name, table in tables().items()}


def page(held: Measured) -> str:
    """The whole page."""
    found = sorted(tables().items())
    present = [(name, table, held[name]) for name, table in found if held[name]]
    absent = [(name, table) for name, table in found if not held[name]]
    tested = judge_claims(present)
    parts = [
        HEAD,
        *_ages(present),
        *_claims_at_a_glance(tested),
        *_wholly_below(tested),
        *_what_it_took(present),
        CHOICES,
        "\n".join([PAPERS, *papers_table(tested)]),
        "\n".join(_list(present, tested)),
        "\n".join(_claims(tested)),
    ]
    if absent:
        lines = [
            f"- `{name}` ({table.scale} size): {table.title}. {missing(table, [])}" for name, table in absent
        ]
        parts += ["\n".join(["## Not run yet", "", *lines])]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def pictures(held: Measured) -> dict[str, str]:
    """Table -> the SVG of its main measure; for every table that has runs."""
    return {name: chart(table, held[name]) for name, table in tables().items() if held[name]}


def _ages(present: Present) -> Iterator[str]:
    old = [name for name, _, runs in present if age(runs)]
    if old:
        why = {age(runs) for _, _, runs in present if age(runs)}
        yield f"{len(old)} of the {len(present)} tables below are old. {' '.join(sorted(why))}"


def judge_claims(present: Present) -> list[Tested]:
    """Every claim of the tables that have runs. Those of one paper are a family, and those of no paper."""
    every = [(name, claim, runs) for name, table, runs in present for claim in table.claims]
    families = [claimed_by_paper(name, claim) for name, claim, _ in every]
    found: dict[int, Tested] = {}
    for family in set(families):
        places = [place for place, each in enumerate(families) if each == family]
        verdicts = judge([every[place][1:] for place in places])
        found |= {place: (*every[place], verdict) for place, verdict in zip(places, verdicts, strict=True)}
    return [found[place] for place in range(len(every))]


def _claims_at_a_glance(tested: Sequence[Tested]) -> Iterator[str]:
    words = Counter(verdict.word for *_, verdict in tested)
    if words:
        refuted, open_claims = words["does not hold"], words["undecided"] + words["not measured"]
        yield (
            f"{words.total()} claims were put to the test: {words['holds']} hold, {refuted} "
            f"{'does' if refuted == 1 else 'do'} not, {open_claims} are undecided."
        )


def _what_it_took(present: Present) -> Iterator[str]:
    runs = [run for _, table, found in present if table.scale == "cpu" for run in found]
    if runs:
        hours = sum(run["seconds"] for run in runs) / 3600
        yield (
            f"The {len(runs):,} runs of the tables at CPU size took {hours:.1f} hours in all, each of one "
            "processor core."
        )


def _list(present: Present, tested: Sequence[Tested]) -> Iterator[str]:
    yield from (
        "## The tables",
        "",
        "| table | seeds | minutes of runs | claims that hold |",
        "| --- | --- | --- | --- |",
    )
    for name, table, runs in present:
        seeds, minutes = len({run["seed"] for run in runs}), sum(run["seconds"] for run in runs) / 60
        words = [verdict.word for of, *_, verdict in tested if of == name]
        claims = f"{words.count('holds')} of {len(words)}" if words else "-"
        gap = f" {missing(table, runs)}" if missing(table, runs) else ""
        yield f"| {_link(name, table)}{gap} | {seeds} | {minutes:.0f} | {claims} |"


def _claims(tested: Sequence[Tested]) -> Iterator[str]:
    """Each claim that is not in the papers' table, with its effect."""
    yield from (
        "## Claims of no paper",
        "",
        "| claim | effect, points | seeds | verdict |",
        "| --- | --- | --- | --- |",
    )
    for name, claim, _, verdict in tested:
        if claimed_by_paper(name, claim) is None:
            effect = verdict.effect or "-"
            yield f"| [{claim.text}]({name}.md) | {effect} | {verdict.seeds} | {verdict.word} |"


def _wholly_below(tested: Sequence[Tested]) -> Iterator[str]:
    """Claims whose effect is the other way round by its own interval, whatever the verdict."""
    below = [
        f"[{claim.text}]({name}.md) {verdict.effect}"
        for name, claim, _, verdict in tested
        if verdict.effect is not None and verdict.effect.high < 0
    ]
    if below:
        yield f"Effects that lie wholly below 0 by their own interval: {'; '.join(below)}."


def _link(name: str, table: Table) -> str:
    return f"[{table.title}]({name}.md)"


def write_pages() -> None:
    """Write the page of each table for a processor or with runs, the pictures, and the list of them."""
    held = measured()
    for name, table in tables().items():
        if table.scale != "paper" or held[name]:
            text = markdown(name, table, held[name], controls_of(table))
            (RESULTS / f"{name}.md").write_text(text)
    PAGE.write_text(page(held))
    PICTURES.mkdir(exist_ok=True)
    for path in PICTURES.glob("*.svg"):
        path.unlink()
    for name, picture in pictures(held).items():
        (PICTURES / f"{name}.svg").write_text(picture)


if __name__ == "__main__":
    write_pages()
    print(PAGE)
