"""Every docstring begins with one line that says, in a sentence, what the thing is or does."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("perennial", "benchmarks", "examples")
LONGEST = 110


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstring of the module and of each class and function in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield node.body[0].lineno, text


def faults(path: Path) -> Iterator[str]:
    """What is wrong with the first lines of a file's docstrings."""
    lines = path.read_text().splitlines()
    for number, text in docstrings(path):
        first, _, rest = text.partition("\n")
        where = f"{path.parent.name}/{path.name}:{number}: {first.strip()[:70]!r}"
        if not first.strip().endswith((".", "?", "!")):
            yield f"{where}: the first line is no whole sentence"
        elif rest.strip() and rest.partition("\n")[0].strip():
            yield f"{where}: no blank line after the first"
        if len(lines[number - 1]) > LONGEST:
            yield f"{where}: longer than {LONGEST} columns"


@pytest.mark.parametrize("room", ROOMS)
def test_a_docstring_begins_with_a_sentence_on_one_line(room: str) -> None:
    found = [fault for path in sorted((ROOT / room).rglob("*.py")) for fault in faults(path)]
    assert not found, f"{len(found)} docstrings:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('"""A site."""', None),
        ('"""A site.\n\nMore of it.\n"""', None),
        ('"""A site that\nhas data."""', "no whole sentence"),
        ('"""A site.\nIts data."""', "no blank line"),
        (f'"""A {"very " * 30}long line."""', "longer than 110"),
    ],
)
def test_what_counts_as_a_fault(tmp_path: Path, text: str, fault: str | None) -> None:
    (tmp_path / "module.py").write_text(text)
    found = list(faults(tmp_path / "module.py"))
    assert len(found) == (fault is not None)
    assert fault is None or fault in found[0]
