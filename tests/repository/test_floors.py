"""A room imports only from floors below its own, at the top of a file or inside a function."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLOORS = [
    ["foundation"],
    ["data", "models", "privacy"],
    ["config", "protocol"],
    ["learning"],
    ["client", "strategies"],
    ["server", "baselines"],
    ["engine", "deploy", "live", "cli"],
    ["benchmarks"],
]
BESIDE = {("cli", "engine"), ("cli", "deploy"), ("cli", "live"), ("live", "deploy"), ("engine", "deploy")}
"""The command line calls the rooms beside it; pages steer what is deployed; the engine needs
deploy/flower_seam.py."""
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
        for path in (ROOT / room).rglob("*.py"):
            for name in imported(path):
                upwards = name in FLOOR and name != room and FLOOR[name] >= floor
                if upwards and (room, name) not in BESIDE:
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_lowest_floors_do_not_know_flower_and_nobody_imports_ray() -> None:
    for room, floor in FLOOR.items():
        for path in (ROOT / room).rglob("*.py"):
            names = imported(path)
            assert "ray" not in names or room == "benchmarks", path
            assert floor > 1 or "flwr" not in names, path


def test_only_the_protocol_builds_records_that_travel() -> None:
    for room in ("client", "strategies", "baselines", "server"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    assert node.func.id not in ("RecordDict", "ArrayRecord", "ConfigRecord"), path
