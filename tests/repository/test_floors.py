"""A room imports only from floors below its own, at the top of a file or inside a function."""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from perennial.config.strategies import SITE_HALVES, STRATEGIES
from perennial.learning.site_method import find_site_half

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "perennial"
FLOORS = [
    ["foundation"],
    ["data", "models", "privacy"],
    ["config", "protocol"],
    ["learning"],
    ["client"],
    ["strategies"],
    ["server", "baselines"],
    ["engine", "deploy", "live", "cli"],
]
BESIDE = {("cli", "engine"), ("cli", "deploy"), ("cli", "live"), ("live", "deploy")}
"""The command line calls the rooms beside it; pages tell of what is deployed."""
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {_room(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {_room(f"{node.module}.{alias.name}") for alias in node.names}
    return names


def _room(module: str) -> str:
    """The room of a module of ours, else its top package."""
    parts = module.split(".")
    return parts[1] if parts[0] == "perennial" and len(parts) > 1 else parts[0]


def test_imports_go_down() -> None:
    wrong = []
    for room, floor in FLOOR.items():
        for path in (PACKAGE / room).rglob("*.py"):
            for name in imported(path):
                upwards = name in FLOOR and name != room and FLOOR[name] >= floor
                if upwards and (room, name) not in BESIDE:
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_package_imports_nothing_that_lies_outside_it() -> None:
    outside = {"benchmarks", "tests", "docs", "examples"}
    assert not [path for path in PACKAGE.rglob("*.py") if imported(path) & outside]


def test_the_lowest_floors_do_not_know_flower_and_nobody_imports_ray() -> None:
    for room, floor in FLOOR.items():
        for path in (PACKAGE / room).rglob("*.py"):
            names = imported(path)
            assert "ray" not in names, path
            assert floor > 1 or "flwr" not in names, path


def test_only_the_protocol_builds_records_that_travel() -> None:
    for room in ("client", "strategies", "baselines", "server"):
        for path in (PACKAGE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    assert node.func.id not in ("RecordDict", "ArrayRecord", "ConfigRecord"), path


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {
        "perennial": PACKAGE / "__init__.py",
        "perennial.library": PACKAGE / "library.py",
    }
    for room in FLOOR:
        for path in (PACKAGE / room).rglob("*.py"):
            name = ".".join(("perennial", *path.relative_to(PACKAGE).with_suffix("").parts))
            found[name.removesuffix(".__init__")] = path
    return found


def imports_of(tree: ast.AST) -> Iterator[str]:
    """What a module imports when it runs, at its top or in a function; not what type checkers alone read."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imports_of(node)


def circle(sources: Mapping[str, str]) -> list[str]:
    """The modules of one circle of imports, the first one again at the end; [] without a circle."""
    graph = {}
    for name, text in sources.items():
        of = {
            found if found in sources else found.rpartition(".")[0] for found in imports_of(ast.parse(text))
        }
        graph[name] = of & sources.keys() - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_itself_by_way_of_others() -> None:
    found = circle({name: path.read_text() for name, path in modules().items()})
    assert not found, " is imported by ".join(found)


@pytest.mark.parametrize("inside", ["import {}", "def f():\n    from {} import x"])
def test_a_circle_is_found_in_functions_too_and_not_in_what_is_for_type_checkers(inside: str) -> None:
    guarded = "if TYPE_CHECKING:\n    from p.b import y"
    assert circle({"p.a": inside.format("p.b"), "p.b": "from p.a import x", "p.c": "import p.a"})
    assert not circle({"p.a": guarded, "p.b": inside.format("p.a")})


def test_rooms_below_the_commands_take_the_version_alone_from_the_face() -> None:
    for room in FLOOR.keys() - {"cli"}:
        for path in (PACKAGE / room).rglob("*.py"):
            names = {name for name in imports_of(ast.parse(path.read_text())) if name.startswith("perennial")}
            face = {name for name in names if "." in name and name.split(".")[1] not in FLOOR}
            assert not face, f"{path.relative_to(ROOT)} imports {', '.join(face)}"


def test_no_file_of_a_site_names_a_method() -> None:
    of_halves = {kind.__name__ for name in SITE_HALVES for kind in find_site_half(name).answers}
    classes = {target.rpartition(":")[2] for target in (*STRATEGIES.values(), *SITE_HALVES.values())}
    forbidden, found = {*STRATEGIES, *of_halves, *classes}, []
    for path in sorted((PACKAGE / "client").rglob("*.py")):
        named = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named.add(node.value)
            elif isinstance(node, ast.ImportFrom):
                named |= {alias.name for alias in node.names}
        found += [f"{path.name}: {name}" for name in sorted(named & forbidden)]
    assert found == []
