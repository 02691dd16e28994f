"""docs/results.md with its pictures, and the page of each table, from the committed results.

`python -m perennial.benchmarks.results_page` writes them again.
Nothing is run here. A table appears with its figures once its result file has a run of the table as it is
now; until then, and while runs are missing, the page says so.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from perennial.benchmarks.chart import chart, main_measure
from perennial.benchmarks.grid import newest
from perennial.benchmarks.markdown import age, claims, figures, listed, markdown, missing
from perennial.benchmarks.paper_claims import judge
from perennial.benchmarks.paper_tables import coverage
from perennial.benchmarks.table import RESULTS, ROOT, Table, tables

PAGE = ROOT / "docs" / "results.md"
PICTURES = ROOT / "docs" / "results"
HEAD = """# Results

Every figure on this page is computed from the runs in `benchmarks/results/`;
`python -m perennial.benchmarks.results_page` writes the page again, and a test keeps the two together.
`perennial bench TABLE` runs what is missing of a table (`--estimate` says how long that takes),
`perennial bench` lists the tables.

Accuracies in per cent: mean and standard deviation over seeds. A claim holds when the difference between
its two rows, taken seed by seed, is above the margin by more than its standard error; it does not hold when
it is below by more; else it is undecided. "Paper" is the paper's own figure, at the paper's own size, which
is not ours.
"""

PAPERS = """## Which table stands for which of the papers'

`perennial bench NAME --estimate` says what one will take; those at the paper's size start with
`--scale paper` only, and want a GPU.
"""


Measured = Mapping[str, Sequence[Mapping[str, Any]]]
"""Table -> its runs, which may be of an old revision."""


def measured(results: Path = RESULTS) -> Measured:
    """What a folder of result files holds. Takes seconds: every row's experiment is read."""
    return {name: newest(table, results / f"{name}.jsonl") for name, table in tables().items()}


def page(held: Measured) -> str:
    """The whole page."""
    found = sorted(tables().items())
    present = [(name, table, held[name]) for name, table in found if held[name]]
    absent = [(name, table) for name, table in found if not held[name]]
    parts = [
        HEAD,
        *_ages(present),
        *_claims_at_a_glance(present),
        *_what_it_took(present),
        "\n".join([PAPERS, *coverage(dict(found))]),
    ]
    for name, table, runs in present:
        parts += ["\n".join(_section(name, table, runs))]
    if absent:
        lines = [
            f"- `{name}` ({table.scale} size): {table.title}. {missing(table, [])}" for name, table in absent
        ]
        parts += ["\n".join(["## Not run yet", "", *lines])]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def pictures(held: Measured) -> dict[str, str]:
    """Table -> the SVG of its main measure; for every table that has runs."""
    return {name: chart(table, held[name]) for name, table in tables().items() if held[name]}


def _ages(present: Sequence[tuple[str, Table, Sequence[Mapping[str, Any]]]]) -> Iterator[str]:
    old = [name for name, _, runs in present if age(runs)]
    if old:
        why = {age(runs) for _, _, runs in present if age(runs)}
        yield f"{len(old)} of the {len(present)} tables below are old. {' '.join(sorted(why))}"


def _claims_at_a_glance(present: Sequence[tuple[str, Table, Sequence[Mapping[str, Any]]]]) -> Iterator[str]:
    words = Counter(judge(claim, runs).word for _, table, runs in present for claim in table.claims)
    if words:
        open_claims = words["undecided"] + words["not measured"]
        yield (
            f"Of {words.total()} claims put to the test here, {words['holds']} hold, "
            f"{words['does not hold']} do not hold, {open_claims} are undecided."
        )


def _what_it_took(present: Sequence[tuple[str, Table, Sequence[Mapping[str, Any]]]]) -> Iterator[str]:
    runs = [run for _, table, found in present if table.scale == "cpu" for run in found]
    if runs:
        hours = sum(run["seconds"] for run in runs) / 3600
        yield (
            f"The {len(runs):,} runs of the tables at CPU size took {hours:.1f} hours in all, each of one "
            "processor core."
        )


def _section(name: str, table: Table, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [f"## {table.title}", ""]
    if table.note:
        lines += [table.note, ""]
    if old := age(runs):
        lines += [old, ""]
    if gap := missing(table, runs):
        lines += [gap, ""]
    lines += [*figures(table, runs), *claims(table, runs), ""]
    lines += [f"![{main_measure(table)}: rows and seeds](results/{name}.svg)", ""]
    seconds = sum(run["seconds"] for run in runs)
    lines.append(
        f"`perennial bench {name}`: seeds {listed(table.seeds)}, {seconds / 60:.0f} minutes of "
        f"runs; {'; '.join(sorted({run['machine'] for run in runs}))}; "
        f"{'; '.join(sorted({_versions(run) for run in runs}))}."
    )
    return lines


def _versions(run: Mapping[str, Any]) -> str:
    return ", ".join(f"{package} {number}" for package, number in run["versions"].items())


def write_pages() -> None:
    """Write the page of each table that is whole or says why not, and the page of all tables."""
    held = measured()
    for name, table in tables().items():
        if table.pending or len(held[name]) == table.planned:
            (RESULTS / f"{name}.md").write_text(markdown(name, table, held[name]))
    PAGE.write_text(page(held))
    PICTURES.mkdir(exist_ok=True)
    for path in PICTURES.glob("*.svg"):
        path.unlink()
    for name, picture in pictures(held).items():
        (PICTURES / f"{name}.svg").write_text(picture)


if __name__ == "__main__":
    write_pages()
    print(PAGE)
