"""Private modules of Flower are imported in one file, and are there in the version that is installed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from perennial.deploy import flower_seam

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation", "flwr")
"""The names that Flower documents; whatever lies deeper is its own."""


def flower_modules(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name for name in names if name.split(".")[0] == "flwr"}


def is_public(module: str) -> bool:
    return module in PUBLIC or module.startswith("flwr.serverapp.strategy")


def test_no_other_file_imports_a_private_module_of_flower() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    ours = [name for name in tracked if not name.startswith("tests/")]
    assert "perennial/deploy/flower_seam.py" in ours
    wrong = {
        name: private
        for name in ours
        if name != "perennial/deploy/flower_seam.py"
        and (private := [module for module in flower_modules(ROOT / name) if not is_public(module)])
    }
    assert not wrong


@pytest.mark.parametrize("name", sorted(flower_seam.PRIVATE))
def test_each_private_name_is_there_and_says_what_it_is_for(name: str) -> None:
    assert getattr(flower_seam, name) is not None
    private = flower_seam.PRIVATE[name]
    assert private.purpose and private.successor


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(flower_seam.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    checked = {
        alias.asname or alias.name
        for line in block.body
        if isinstance(line, ast.ImportFrom) and line.module != "types"
        for alias in line.names
    } | {
        line.target.id
        for line in block.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
    assert checked == flower_seam.PRIVATE.keys()


def test_asking_for_nothing_imports_nothing() -> None:
    program = (
        "import sys, perennial.deploy.flower_seam; print([n for n in sys.modules if n.startswith('flwr')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
