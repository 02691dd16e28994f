"""How large the project is: `python -m benchmarks.counts [REVISION ...]` writes benchmarks/results/counts.md.

A column stands for each revision, and the last for HEAD. Each state is unpacked into a folder and counted
there by a process that imports it: keys are those of the classes that read a person's file, commands those
that the program registers, and the files of a round those that its second round enters.
"""

import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "benchmarks" / "results" / "counts.md"
LONGEST = 500
GENERATED = ("what_leaves_a_site.md", "results.md")
"""Pages that programs write."""
LAYERS = [
    ["foundation"],
    ["data", "models", "privacy"],
    ["config", "protocol"],
    ["learning"],
    ["client", "strategies"],
    ["server", "baselines"],
    ["engine", "simulation", "deploy", "live", ""],
    ["cli"],
]
"""Of packages, lowest first; '' stands for the modules of perennial/ itself. An import goes down or stays."""
CONVERTERS = ("to", "from", "as", "of", "main")
VERBS = frozenset(Path(__file__).with_name("verbs.txt").read_text().split())
"""First words of names that say what a function does."""


def main() -> None:
    """Count every state and write the page."""
    revisions = [*sys.argv[1:], "HEAD"]
    columns = {revision: count_revision(revision) for revision in revisions}
    here = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    names = [*revisions[:-1], here]
    lines = ["# How large the project is", "", "`python -m benchmarks.counts before-cut`.", ""]
    lines += [f"| | {' | '.join(names)} |", f"| --- |{' ---: |' * len(names)}"]
    lines += [
        f"| {name} | {' | '.join(_show(column.get(name)) for column in columns.values())} |"
        for name in columns["HEAD"]
    ]
    PAGE.write_text("\n".join(lines) + "\n")
    print(PAGE.read_text())


def _show(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.0%}"


def count_revision(revision: str) -> dict[str, Any]:
    """Unpack a revision and count it in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", revision], cwd=ROOT, capture_output=True, check=True
        ).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        command = [sys.executable, str(Path(__file__).resolve()), "--inside"]
        environment = os.environ | {"PYTHONPATH": folder}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{revision}: {done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])


def count(root: Path) -> dict[str, Any]:
    """Everything that is counted of a checkout whose code this process imports."""
    product = [path for top in ("perennial", "plugins") for path in python_files(root / top)]
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    pages = [page for page in pages if page.name not in GENERATED]
    trees = {path: ast.parse(path.read_text()) for path in product}
    found: dict[str, Any] = {
        "lines of product": count_lines(product),
        "logical lines of product": sum(count_logical_lines(path.read_text()) for path in product),
        "lines of benchmarks": count_lines(python_files(root / "benchmarks")),
        "lines of tests": count_lines(python_files(root / "tests")),
        "words of pages, generated ones apart": sum(len(page.read_text().split()) for page in pages),
        "files of product": len(product),
        f"files above {LONGEST} lines": sum(count_lines([path]) > LONGEST for path in product),
        "files of at most 80 lines": sum(count_lines([path]) <= 80 for path in product),
    }
    names = [name for tree in trees.values() for name in function_names(tree)]
    found["functions that begin with a verb"] = sum(begins_with_verb(name) for name in names) / len(names)
    graph = build_graph(root, trees)
    found["circles of imports"] = len(find_circles(graph))
    found["imports that run up"] = len(find_imports_up(graph))
    for measure in (count_keys, count_commands, trace_round):
        try:
            found |= measure()
        except (ImportError, AttributeError) as error:
            print(f"{measure.__name__}: {error!r}", file=sys.stderr)
    return found


def python_files(folder: Path) -> list[Path]:
    """Python files below a folder; links are followed nowhere."""
    return sorted(path for path in folder.rglob("*.py") if not path.is_symlink())


def count_lines(paths: list[Path]) -> int:
    """All lines."""
    return sum(path.read_text().count("\n") for path in paths)


def count_logical_lines(text: str) -> int:
    """Statements as Python's tokeniser ends them, without docstrings."""
    ended = sum(
        token.type == tokenize.NEWLINE for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )
    strings = sum(
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for node in ast.walk(ast.parse(text))
    )
    return ended - strings


def function_names(tree: ast.Module) -> Iterator[str]:
    """Functions and methods, without properties, converters (`to_x`) and what Python calls itself."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("__"):
            continue
        is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
        if not is_property and node.name.strip("_").split("_")[0] not in CONVERTERS:
            yield node.name


def begins_with_verb(name: str) -> bool:
    """Whether a function's name begins so."""
    return name.strip("_").split("_")[0] in VERBS


Graph = dict[str, set[str]]
"""Module -> modules of ours that it imports anywhere, also for type checkers alone."""


def build_graph(root: Path, trees: dict[Path, ast.Module]) -> Graph:
    """The imports among modules of ours."""
    names = {".".join(path.relative_to(root).with_suffix("").parts): path for path in trees}
    modules = {name.removesuffix(".__init__"): trees[path] for name, path in names.items()}
    graph: Graph = {}
    for module, tree in modules.items():
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                inside = {f"{node.module}.{alias.name}" for alias in node.names} & modules.keys()
                found |= inside or {node.module}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        # the version is a constant of the package itself, which every module imports anyway
        graph[module] = found & modules.keys() - {module, "perennial"}
    return graph


def find_circles(graph: Graph) -> list[set[str]]:
    """Sets of two modules or more that import each other, directly or by way of others (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[set[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in graph[module]:
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            place = stack.index(module)
            if len(stack) - place > 1:
                circles.append(set(stack[place:]))
            del stack[place:]

    for module in graph:
        if module not in index:
            visit(module)
    return circles


def find_imports_up(graph: Graph) -> set[tuple[str, str]]:
    """(package, package) of imports from a layer to a higher one."""
    layer = {package: number for number, packages in enumerate(LAYERS) for package in packages}

    def package_of(module: str) -> str:
        parts = module.split(".")
        return parts[1] if len(parts) > 1 and parts[1] in layer else ""

    pairs = {(package_of(module), package_of(other)) for module in graph for other in graph[module]}
    return {(one, other) for one, other in pairs if other and layer[other] > layer[one]}


def count_keys() -> dict[str, Any]:
    """Keys that a person can write into an experiment, into site.yaml beyond its data, and for a strategy."""
    from pkgutil import resolve_name

    from perennial.config.experiment import Experiment
    from perennial.config.site import SiteConfig

    try:
        from perennial.config.strategies import STRATEGIES
    except ImportError:
        # before-cut has the registry there
        from perennial.strategies.factory import STRATEGIES
    kinds = [resolve_name(kind) if isinstance(kind, str) else kind for kind in STRATEGIES.values()]
    of_strategies = len({keyword for kind in kinds for keyword in list_keywords(kind)})
    experiment, site = (
        len(set(list_paths(Experiment))),
        len({path for path in list_paths(SiteConfig) if not path.startswith("data.")}),
    )
    return {
        "keys of an experiment": experiment,
        "keys of site.yaml": site,
        "keywords of strategies": of_strategies,
        "keys in all": experiment + site + of_strategies,
    }


def list_keywords(kind: Any) -> Iterator[tuple[str, str]]:
    """(class, keyword) of what a strategy's settings name, its own and those that it inherits."""
    import inspect

    filled = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    settings = getattr(kind, "Settings", None)
    if settings is not None:
        yield from ((kind.__qualname__, name) for name in settings.model_fields)
        return
    for one in kind.__mro__:
        if one.__module__.startswith("perennial") and "__init__" in vars(one):
            for name, parameter in inspect.signature(vars(one)["__init__"]).parameters.items():
                if name not in ("self", "base") and parameter.kind in filled:
                    yield one.__qualname__, name


def list_paths(model: Any, prefix: str = "", above: tuple[Any, ...] = ()) -> Iterator[str]:
    """Paths of all keys of a pydantic model, with those of the models inside."""
    from pydantic import BaseModel

    def models_in(annotation: Any) -> Iterator[Any]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        for part in getattr(annotation, "__args__", ()):
            yield from models_in(part)

    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        yield path
        for inner in models_in(field.annotation):
            if inner not in above:
                yield from list_paths(inner, f"{path}.", (*above, model))


def count_commands() -> dict[str, Any]:
    """Commands that the program registers and shows."""
    import click
    import typer

    from perennial.cli.main import app

    def leaves(command: click.Command) -> int:
        if not isinstance(command, click.Group):
            return 1
        return sum(leaves(each) for each in command.commands.values() if not each.hidden)

    return {"commands": leaves(typer.main.get_command(app))}


def trace_round() -> dict[str, Any]:
    """Files and functions of ours that the second round of the quickstart enters."""
    import perennial
    from perennial.server import rounds

    top = str(Path(perennial.__file__).resolve().parent)
    entered: set[tuple[str, str]] = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and os.path.realpath(name).startswith(top):
            entered.add((os.path.realpath(name), frame.f_code.co_qualname))

    number, original = 0, rounds.Rounds.run

    def run(self: Any) -> Any:
        nonlocal number
        number += 1
        if number != 2:
            return original(self)
        sys.setprofile(profile)
        try:
            return original(self)
        finally:
            sys.setprofile(None)

    rounds.Rounds.run = run  # pyright: ignore[reportAttributeAccessIssue]
    with tempfile.TemporaryDirectory() as runs:
        perennial.run("experiments/quickstart.yaml", name="trace", runs=runs)
    return {
        "files that a round crosses": len({file for file, _ in entered}),
        "functions that a round crosses": len(entered),
    }


Measure = Callable[[], dict[str, Any]]

if __name__ == "__main__":
    if sys.argv[1:] == ["--inside"]:
        print(json.dumps(count(Path.cwd())))
    else:
        main()
