"""What README.md and docs/ say is there: figures, commands, files and links."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
import yaml

from perennial.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FIGURE = re.compile(r"\d+\.\d+ ± \d+\.\d+")
CODE = re.compile(r"^```[a-z]*\n(.*?)^```|^    (\S.*?)$|`([^`]+)`", re.DOTALL | re.MULTILINE)
# `from perennial import ...` names the package
COMMAND = re.compile(r"(?<!from )\bperennial +([a-z][a-z-]*)(?: +([a-z][a-z-]*)(?![\w./]))?")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
EXPERIMENT = re.compile(r"\bexperiments/(\w+\.yaml)")
SOURCE = re.compile(r"`([a-z_]+(?:/[a-z_0-9]+)+\.py)`")


@pytest.fixture(params=DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def document(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_every_figure_is_in_the_results(document: Path) -> None:
    results = "\n".join(path.read_text() for path in (ROOT / "benchmarks" / "results").glob("*.md"))
    measured = set(FIGURE.findall(results))
    unknown = [figure for figure in FIGURE.findall(document.read_text()) if figure not in measured]
    assert not unknown, f"not in benchmarks/results: {', '.join(unknown)}"


def test_a_page_with_figures_of_old_tables_says_so(document: Path) -> None:
    """Made before the keyed split: a reader must see it where the figure stands, not in the table alone."""
    text = document.read_text()
    results = ROOT / "benchmarks" / "results"
    old = {path.stem for path in results.glob("*.md") if "**These figures are old:**" in path.read_text()}
    # tables are named by their words with underscores; other results by a link
    named = {name for name in old if re.search(rf"\b{name}\b" if "_" in name else rf"results/{name}\.", text)}
    assert not named or re.search(r"\*\*(These f|F)igures (here )?are old", text), sorted(named)


def test_every_command_exists(document: Path) -> None:
    root = typer.main.get_command(app)
    assert isinstance(root, click.Group)
    unknown = []
    for name, inner in commands(document.read_text()):
        command = root.commands.get(name)
        if command is None:
            unknown.append(name)
        elif isinstance(command, click.Group) and inner and inner not in command.commands:
            unknown.append(f"{name} {inner}")
    assert not unknown, f"no such command: {', '.join(unknown)}"


def test_every_link_experiment_and_source_file_exists(document: Path) -> None:
    text = document.read_text()
    targets = [document.parent / link for link in LINK.findall(text) if "://" not in link]
    targets += [ROOT / "experiments" / name for name in EXPERIMENT.findall(text)]
    places = ((ROOT / source, ROOT / "perennial" / source) for source in SOURCE.findall(text))
    targets += [inside if inside.exists() else here for here, inside in places]
    missing = [str(target) for target in targets if not target.exists()]
    assert not missing, f"missing: {', '.join(missing)}"


@pytest.mark.parametrize("page", DOCUMENTS[1:], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_opens_with_what_its_reader_can_do_after_it(page: Path) -> None:
    title, nothing, first = page.read_text().splitlines()[:3]
    assert title.startswith("# ") and nothing == "" and first


def test_each_page_stands_in_one_of_the_four_parts() -> None:
    parts = yaml.safe_load((ROOT / "docs" / "mkdocs.yml").read_text())["nav"]
    assert [name for part in parts for name in part][1:5] == [
        "Tutorial",
        "How-to",
        "Explanation",
        "Reference",
    ]
    listed = [
        path for part in parts[1:5] for pages in part.values() for one in pages for path in one.values()
    ]
    written = [path for path in listed if path.startswith("docs/")]
    assert sorted(written) == sorted(str(page.relative_to(ROOT)) for page in DOCUMENTS[1:])


def test_every_strategy_and_command_stands_on_its_page() -> None:
    from perennial.strategies.factory import STRATEGIES

    text = (ROOT / "docs" / "commands.md").read_text()
    root = typer.main.get_command(app)
    assert isinstance(root, click.Group)
    assert {name for name, command in root.commands.items() if not command.hidden} <= {
        name for name, _ in commands(text)
    }
    methods = (ROOT / "docs" / "methods" / "overview.md").read_text()
    assert [name for name in STRATEGIES if f"`{name}`" not in methods] == []


def commands(text: str) -> Iterator[tuple[str, str]]:
    """(command, next word or "") of every `perennial ...` in a document's code."""
    for parts in CODE.findall(text):
        yield from COMMAND.findall("".join(parts))
