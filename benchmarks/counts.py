"""How large the project is: lines of product, benchmarks and tests, commands, keys of files, pages.

`python -m benchmarks.counts [REVISION ...]` prints a table with a column for each revision of this
repository, and one for the files as they lie here. Lines are all lines of Python files; commands are those
that the program registers; keys are fields of classes that are read from a file that a person writes.
"""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[1]
APART = ("benchmarks", "tests", "docs", "examples", "docker")
WRITTEN = ("config/", "data/config.py", "data/tasks_config.py", "models/config.py", "privacy/config.py")
"""Where the classes of experiment.yaml and site.yaml are."""

T = TypeVar("T", bound=ast.AST)
Read = Callable[[str], str]


def main() -> None:
    """Print the table."""
    columns = {revision: counts(*_of_revision(revision)) for revision in sys.argv[1:]}
    columns["here"] = counts(*_here())
    print("| |", " | ".join(columns), "|")
    print("| --- |" + " ---: |" * len(columns))
    for name in columns["here"]:
        print(f"| {name} |", " | ".join(f"{column[name]:,}" for column in columns.values()), "|")


def counts(names: list[str], read: Read) -> dict[str, int]:
    """Count what the files of one state of the repository hold.

    names: paths of all files. read: the text of one.
    """
    python = [name for name in names if name.endswith(".py") and not name.startswith(".")]
    lines = {name: read(name).count("\n") for name in python}
    product = [name for name in python if not name.startswith(APART)]
    pages = [name for name in names if name.endswith(".md") and name.startswith(("docs/", "README"))]
    return {
        "lines of product": sum(lines[name] for name in product),
        "lines of the product's other files": sum(
            read(name).count("\n")
            for name in names
            if not name.startswith(APART) and name.endswith((".yaml", ".toml", ".html", ".css", ".js"))
        ),
        "lines of benchmarks": sum(lines[name] for name in python if name.startswith("benchmarks/")),
        "lines of tests": sum(lines[name] for name in python if name.startswith("tests/")),
        "commands": sum(_commands(read(name)) for name in product if name.startswith("cli/")),
        "keys": sum(_keys(read(name)) for name in product if name.startswith(WRITTEN)),
        "pages": len(pages),
        "lines of pages": sum(read(name).count("\n") for name in pages),
        "lines of results' pages": sum(
            read(name).count("\n")
            for name in names
            if name.startswith("benchmarks/results/") and name[-3:] == ".md"
        ),
    }


def _commands(text: str) -> int:
    """Registrations of commands, as a decorator or by a call; hidden ones are words of before."""
    return sum(
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "command"
        and not any(option.arg == "hidden" for option in call.keywords)
        for call in _nodes(text, ast.Call)
    )


def _keys(text: str) -> int:
    return sum(
        isinstance(line, ast.AnnAssign)
        for kind in _nodes(text, ast.ClassDef)
        if kind.bases
        for line in kind.body
    )


def _nodes(text: str, kind: type[T]) -> Iterator[T]:
    return (node for node in ast.walk(ast.parse(text)) if isinstance(node, kind))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _of_revision(revision: str) -> tuple[list[str], Read]:
    lines = _git("ls-tree", "-r", revision).splitlines()
    files = [line.split("\t")[1] for line in lines if not line.startswith("120000")]  # a link is no file
    return files, lambda name: _git("show", f"{revision}:{name}")


def _here() -> tuple[list[str], Read]:
    files = [name for name in _git("ls-files").splitlines() if (ROOT / name).is_file()]
    return [name for name in files if not (ROOT / name).is_symlink()], lambda name: (ROOT / name).read_text()


if __name__ == "__main__":
    main()
