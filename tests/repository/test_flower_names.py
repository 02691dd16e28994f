"""Perennial uses what Flower documents. Each private name that is left stands here with its reason."""

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation", "flwr")
"""The modules that Flower documents; whatever lies deeper is its own."""
PRIVATE = {
    # a site must not unpack or import what arrives, and Flower has no switch for that; where these names are
    # others, the site does not start
    "perennial/deploy/pinned_app.py": {"flwr.supernode.runtime.run_clientapp"},
    # the in-process engine is a runtime of Flower, and strategies of Flower build messages in it; every
    # runtime sets this identity, without which Message() raises, and there is no public way to set it
    "perennial/engine/grid.py": {"flwr.supercore.task_identity"},
}


def flower_modules(path: Path) -> set[str]:
    """Modules of Flower that a file imports, or names in a text."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return {name for name in names if name.split(".")[0] == "flwr"}


def is_public(module: str) -> bool:
    return module in PUBLIC or module.startswith("flwr.serverapp.strategy")


def test_no_private_name_of_flower_is_used_but_those_that_are_listed() -> None:
    command = ["git", "ls-files", "-co", "--exclude-standard", "*.py"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    found = {
        name: private
        for name in tracked
        if not name.startswith("tests/") and (ROOT / name).is_file()
        if (private := {module for module in flower_modules(ROOT / name) if not is_public(module)})
    }
    assert found == PRIVATE
