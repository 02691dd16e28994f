"""Rooms are `perennial.<room>` everywhere: a bare `import data` works in a checkout, and gives a second copy
of every class."""

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    *("foundation", "config", "protocol", "data", "models", "privacy", "learning"),
    *("client", "strategies", "baselines", "server", "engine", "deploy", "cli"),
)
ROOM = rf"(?:{'|'.join(ROOMS)})"
AS_TEXT = re.compile(rf"^{ROOM}(?:\.[a-z_]\w*)+(?::[A-Za-z_]\w*)?$")
"""A module, or an object in it, as a string."""
KEYS = {"data.partition", "data.samples", "data.npz"}
"""Keys of an experiment, and a file of a run's folder, that are called as a module is."""
COMMAND = rf"python[\d.]* +-m +{ROOM}\b(?!/)"
STATEMENT = rf"^\s*(?:>>> )?(?:from +{ROOM}(?:\.\w+)* +import\b|import +{ROOM}(?:\.\w+)* *$)"
IN_PAGES = re.compile(f"(?:{COMMAND})|(?:{STATEMENT})", re.MULTILINE)


def files(*suffixes: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    found = [ROOT / name for name in listed.splitlines() if name.endswith(suffixes)]
    return [path for path in found if path.is_file() and not path.is_symlink()]


def is_module(text: str) -> bool:
    """Whether a string names a file of ours, with or without an object in it."""
    if text in KEYS:
        return False
    path = (ROOT / "perennial").joinpath(*text.partition(":")[0].split("."))
    return path.with_suffix(".py").is_file() or (":" in text and path.is_dir())


def test_no_file_imports_a_bare_room() -> None:
    found = []
    for path in files(".py"):
        if path.name == Path(__file__).name:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules: list[str] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules = [node.module]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if AS_TEXT.match(node.value) and is_module(node.value):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.value!r}")
                found += [
                    f"{path.relative_to(ROOT)}:{node.lineno}: {match.group().strip()}"
                    for match in IN_PAGES.finditer(node.value)
                ]
            found += [
                f"{path.relative_to(ROOT)}: {module}" for module in modules if module.split(".")[0] in ROOMS
            ]
    assert found == []


def test_no_page_or_setting_names_a_bare_room() -> None:
    found = []
    for path in files(".md", ".toml", ".yaml", ".yml", ".sh", "Makefile", "run", "Dockerfile"):
        text = path.read_text(encoding="utf-8")
        found += [f"{path.relative_to(ROOT)}: {match.group().strip()}" for match in IN_PAGES.finditer(text)]
    assert found == []


def test_the_patterns_find_what_they_are_for() -> None:
    assert AS_TEXT.match("client.app") and is_module("client.app")
    assert AS_TEXT.match("server.app:app") and is_module("server.app:app")
    assert not is_module("data.sites")
    for text in ("python -m cli.main", "from strategies.fedavg import FedAvg", "import config"):
        assert IN_PAGES.search(text)
    for text in ("python -m benchmarks.bench", "from perennial.data import x", "import data of"):
        assert not IN_PAGES.search(text)
