"""Sheets of the five papers' protocols: value in the paper, ours, and why they differ.

`papers/NAME.yaml` says for each key of a recipe what the paper has; `silent` is what it does not tell.
`python -m benchmarks.paper_sheets` writes the recipes `experiments/NAME_as_published.yaml` and
`results/papers.md` from the sheets. The tables of the papers' sizes are read from them.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, model_validator

from benchmarks.grid import Result, finished
from benchmarks.intervals import half_width
from benchmarks.paper_claims import Claim
from benchmarks.table import EXPERIMENTS, RESULTS, STANDARD, Measure, Row, Table, table_called
from perennial.foundation.plain import Block

SHEETS = Path(__file__).with_name("papers")
PAGE = "papers.md"
WIDTH = 110
HEAD = """# What the papers say of their protocols, and what the recipes here have

Written by `python -m benchmarks.paper_sheets` from `benchmarks/papers/`, as are the recipes
`experiments/*_as_published.yaml` and the tables of the papers' sizes. Where the last column is empty, the
recipe has the paper's value. The paper's figures stand before ours, in per cent. Ours are means over seeds
and half their 95 % intervals, of the size that the last column tells: those of small sizes are no test of the
paper's.
"""


class Value(Block):
    """One key of a recipe. ours: None where it is the paper's value. why: of every difference."""

    paper: Any
    ours: Any = None
    why: str = ""

    @model_validator(mode="after")
    def _a_difference_has_a_reason(self) -> "Value":
        if self.ours is not None and not self.why:
            raise ValueError(f"why is missing: the paper has {self.paper!r}, the recipe {self.ours!r}")
        if self.ours is None and self.why:
            raise ValueError(f"why: found {self.why!r}, but the recipe has the paper's value {self.paper!r}")
        if self.ours is None and self.paper == "silent":
            raise ValueError("ours is missing: the paper does not tell this value")
        return self

    @property
    def used(self) -> Any:
        """The recipe's value."""
        return self.paper if self.ours is None else self.ours


class Elsewhere(Block):
    """A part of the paper's protocol that its recipe does not have."""

    what: str
    paper: str
    why: str = Field(min_length=1)


class Ran(Block):
    """Runs of ours that stand beside the figures of a case.

    rows: method -> its row's label, where that differs. measure: where the table calls it otherwise.
    """

    table: str
    rows: dict[str, str] = Field(default_factory=dict)
    measure: str = ""


class Case(Block):
    """A line of the paper's tables. table: its own, where the cases do not share one.

    paper: method -> per cent, of the first measure or by measure.
    """

    changes: dict[str, Value] = Field(default_factory=dict)
    paper: dict[str, float | dict[str, float]]
    table: str = ""
    ran: Ran | None = None


class Size(Block):
    """The tables of the paper's size. name: of the one that all cases share. "{case}" in a title is the case.

    changes: of all rows. methods: what each changes; "{sites}" is the case's number of sites.
    """

    name: str = ""
    title: str
    note: str = ""
    seeds: Value
    changes: dict[str, Value] = Field(default_factory=dict)
    methods: dict[str, dict[str, Any]]
    cases: dict[str, Case]

    def label(self, case: str, method: str) -> str:
        """Of a row."""
        return f"{case}: {method}" if self.name else method


class Sheet(Block):
    """One paper."""

    paper: str
    source: str
    about: str
    keys: dict[str, Value]
    elsewhere: tuple[Elsewhere, ...] = ()
    table: Size


def read_sheets(folder: Path = SHEETS) -> dict[str, Sheet]:
    """The sheets by the beginning of their papers' names. Raises pydantic's error for a faulty one."""
    return {
        path.stem: Sheet.model_validate(yaml.safe_load(path.read_text()))
        for path in sorted(folder.glob("*.yaml"))
    }


def recipe(name: str, sheet: Sheet) -> str:
    """The experiment file of a sheet, as text."""
    content: dict[str, Any] = {"name": f"{name}_as_published".replace("_", "-"), "seed": 1}
    for key, value in sheet.keys.items():
        *blocks, last = key.split(".")
        inner = content
        for block in blocks:
            # a preset would add settings that no sheet answers for
            inner = inner.setdefault(block, {"preset": "none"} if block == "learner" else {})
        inner[last] = value.used
    body = yaml.safe_dump(content, sort_keys=False, width=WIDTH, default_flow_style=None)
    return (
        f"# {sheet.about}\n# {sheet.source}. Written by `python -m benchmarks.paper_sheets` from\n"
        f"# benchmarks/papers/{name}.yaml, which says of each key what the paper has.\n{body}"
    )


def tables_of_paper(
    paper: str, measures: Mapping[str, Measure] = STANDARD, claims: Sequence[Claim] = ()
) -> dict[str, Table]:
    """The tables of a paper's size. measures: the first is that of figures which name none."""
    size, first = read_sheets()[paper].table, next(iter(measures))
    found: dict[str, Table] = {}
    for label, case in size.cases.items():
        rows = [
            Row(
                size.label(label, method),
                f"{paper}_as_published",
                tuple(_changes(size.changes, case.changes, changes)),
                figures if isinstance(figures := case.paper.get(method, {}), dict) else {first: figures},
            )
            for method, changes in size.methods.items()
        ]
        name = case.table or size.name
        before = found[name].rows if name in found else ()
        found[name] = Table(
            size.title.replace("{case}", label),
            [*before, *rows],
            seeds=tuple(range(1, size.seeds.used + 1)),
            measures=measures,
            scale="paper",
            note=f"{size.note} Protocol: `benchmarks/results/{PAGE}`.".strip(),
            claims=claims,
        )
    return found


def _changes(
    size: Mapping[str, Value], case: Mapping[str, Value], method: Mapping[str, Any]
) -> Iterator[str]:
    """KEY=VALUE for each."""
    for key, value in (*size.items(), *case.items()):
        yield f"{key}={json.dumps(value.used)}"
    for key, value in method.items():
        yield f"{key}={json.dumps(case['data.sites'].used if value == '{sites}' else value)}"


def page(sheets: Mapping[str, Sheet]) -> str:
    """All sheets as Markdown."""
    lines = [HEAD]
    for name, sheet in sheets.items():
        lines += [
            f"## {sheet.paper}",
            "",
            f"{sheet.source}. Recipe: `experiments/{name}_as_published.yaml`.",
            "",
            "| key | paper | ours | why |",
            "| --- | --- | --- | --- |",
        ]
        lines += [_line(f"`{key}`", value) for key, value in sheet.keys.items()]
        lines += [f"| {each.what} | {each.paper} | not run | {each.why} |" for each in sheet.elsewhere]
        lines += _size(sheet.table)
        lines += ["", *_figures(sheet.table), ""]
    return "\n".join(lines)


def _line(key: str, value: Value) -> str:
    ours = "" if value.ours is None else f"`{_short(value.ours)}`"
    return f"| {key} | {_short(value.paper)} | {ours} | {value.why} |"


def _size(size: Size) -> Iterator[str]:
    """Lines of what the tables of the paper's size have in another way than the paper."""
    yield _line("seeds of the tables", size.seeds)
    for label, case in (("all tables", size), *size.cases.items()):
        yield from (_line(f"`{key}`, {label}", value) for key, value in case.changes.items() if value.why)


def _figures(size: Size) -> Iterator[str]:
    """The paper's figures as a table, each with ours: at the paper's size, or else of the case's runs."""
    methods = [each for each in size.methods if any(each in case.paper for case in size.cases.values())]
    yield f"| paper / ours | {' | '.join(methods)} | ours are of |"
    yield "| --- " * (len(methods) + 2) + "|"
    for label, case in size.cases.items():
        ran = Ran(table=case.table or size.name, rows={each: size.label(label, each) for each in methods})
        figures = {row.label: row.paper for row in table_called(ran.table).rows}
        papers = {method: figures[ran.rows[method]] for method in methods}
        if case.ran and not any(_read_runs(ran.table).values()):
            ran = case.ran
        for head in dict.fromkeys(head for paper in papers.values() for head in paper):
            cells = [
                f"{paper[head]:g} / {_ours(ran, method, head)}" if head in paper else ""
                for method, paper in papers.items()
            ]
            yield f"| {label}, {head} | {' | '.join(cells)} | {_where(ran, methods[0])} |"


def _ours(ran: Ran, method: str, head: str) -> str:
    """Mean over seeds in per cent and half its interval; a dash without runs."""
    runs = _read_runs(ran.table)[ran.rows.get(method, method)]
    found = [100 * run["measures"][ran.measure or head] for run in runs]
    return f"{statistics.mean(found):.1f} ± {half_width(found):.1f}" if len(found) > 1 else "-"


def _where(ran: Ran, method: str) -> str:
    """The table of our figures, and its size."""
    if not any(_read_runs(ran.table).values()):
        return "not run"
    table = table_called(ran.table)
    row = next(row for row in table.rows if row.label == ran.rows.get(method, method))
    used = row.load(table.seeds[0])
    samples = used.data.samples_limit or "all"
    size = f"{table.title} (samples: {samples}, rounds a task: {used.tasks.rounds})"
    return f"[{ran.table}]({ran.table}.md): {size}{ran.measure and f', {ran.measure}'}"


@cache
def _read_runs(name: str) -> dict[str, list[Result]]:
    """The finished runs of a table by row."""
    table = table_called(name)
    found: dict[str, list[Result]] = {row.label: [] for row in table.rows}
    for run in finished(table, RESULTS / f"{name}.jsonl").values():
        found[run["row"]].append(run)
    return found


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value).replace('"', "")


def main() -> None:
    """Write the recipes and the page."""
    sheets = read_sheets()
    for name, sheet in sheets.items():
        (EXPERIMENTS / f"{name}_as_published.yaml").write_text(recipe(name, sheet))
    (RESULTS / PAGE).write_text(page(sheets))


if __name__ == "__main__":
    main()
