"""Sheets of the five papers' protocols: value in the paper, ours, and why they differ.

`papers/NAME.yaml` says for each key of a recipe what the paper has; `silent` is what it does not tell.
`python -m benchmarks.paper_sheets` writes the recipes `experiments/NAME_as_published.yaml` and
`results/papers.md` from the sheets. The tables of FedDig's and TriCon-SF's size are read from them.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, model_validator

from benchmarks.table import EXPERIMENTS, RESULTS, Measure, Row, Table, of
from perennial.foundation.plain import Block

SHEETS = Path(__file__).with_name("papers")
PAGE = "papers.md"
WIDTH = 110
HEAD = """# What the papers say of their protocols, and what the recipes here have

Written by `python -m benchmarks.paper_sheets` from `benchmarks/papers/`, as are the recipes
`experiments/*_as_published.yaml`. Where the last column is empty, the recipe has the paper's value.
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


class Case(Block):
    """A line of the paper's table. changes: key of the recipe -> value. paper: method -> per cent."""

    changes: dict[str, Any]
    paper: dict[str, float]


class Size(Block):
    """The table of the paper's size. why: of what differs from the paper in all rows."""

    name: str
    title: str
    seeds: int
    why: str
    changes: dict[str, Any]
    methods: dict[str, dict[str, Any]]
    cases: dict[str, Case]
    rounds_measured: tuple[int, int] | None = None


class Sheet(Block):
    """One paper."""

    paper: str
    source: str
    about: str
    keys: dict[str, Value]
    elsewhere: tuple[Elsewhere, ...] = ()
    table: Size | None = None


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


def tables_of_sheets() -> dict[str, Table]:
    """The tables of the papers' sizes that sheets describe."""
    return {
        sheet.table.name: _table(f"{name}_as_published", sheet.table)
        for name, sheet in read_sheets().items()
        if sheet.table is not None
    }


def _table(experiment: str, size: Size) -> Table:
    head, measure = "final accuracy", of("final_accuracy")
    if size.rounds_measured:
        head, measure = _mean_of_rounds(*size.rounds_measured)
    rows = [
        Row(
            f"{label}: {method}",
            experiment,
            (*_changes(size.changes), *_changes(case.changes), *_changes(changes, case.changes)),
            {head: case.paper[method]} if method in case.paper else {},
        )
        for label, case in size.cases.items()
        for method, changes in size.methods.items()
    ]
    return Table(
        size.title,
        rows,
        seeds=tuple(range(1, size.seeds + 1)),
        measures={head: measure},
        scale="paper",
        note=f"{size.why} Protocol: `benchmarks/results/{PAGE}`.",
    )


def _mean_of_rounds(first: int, last: int) -> tuple[str, Measure]:
    def measure(summary: dict[str, Any]) -> float:
        part = summary["accuracy_by_round"][first - 1 : last]
        return sum(part) / len(part)

    return f"mean of rounds {first} to {last}", measure


def _changes(changes: Mapping[str, Any], case: Mapping[str, Any] | None = None) -> Iterator[str]:
    """KEY=VALUE for each; "{sites}" is the case's number of sites."""
    for key, value in changes.items():
        yield f"{key}={json.dumps((case or {})['data.sites'] if value == '{sites}' else value)}"


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
        for key, value in sheet.keys.items():
            ours = "" if value.ours is None else f"`{_short(value.ours)}`"
            lines.append(f"| `{key}` | {_short(value.paper)} | {ours} | {value.why} |")
        lines += [f"| {each.what} | {each.paper} | not run | {each.why} |" for each in sheet.elsewhere]
        if sheet.table is not None:
            lines += ["", f"Figures of the paper stand beside ours in `{sheet.table.name}`."]
        lines.append("")
    return "\n".join(lines)


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
