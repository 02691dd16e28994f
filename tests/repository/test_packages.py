"""What is imported is declared, and what is declared is installed in an allowed version, Python too."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import perennial

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = CONFIGURATION["project"]
ROOMS = ("perennial", "benchmarks")
OF_PEERS = ("benchmarks/peers/",)
"""Programs that run in environments of other simulators."""


def declared() -> dict[str, Requirement]:
    lines = [
        *PROJECT["dependencies"],
        *(x for extra in PROJECT["optional-dependencies"].values() for x in extra),
    ]
    requirements = [Requirement(line) for line in lines]
    return {canonicalize_name(found.name): found for found in requirements if found.name != PROJECT["name"]}


def imported() -> dict[str, set[str]]:
    """Top-level package -> files that import it, outside the standard library and Perennial."""
    found: dict[str, set[str]] = {}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith(OF_PEERS):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                modules: list[str] = []
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module:
                    modules = [node.module]
                for module in modules:
                    top = module.partition(".")[0]
                    if top not in sys.stdlib_module_names and top not in ROOMS:
                        found.setdefault(top, set()).add(name)
    return found


def test_every_package_that_is_imported_is_declared() -> None:
    distributions, known = packages_distributions(), declared()
    missing = {}
    for top, files in imported().items():
        names = {canonicalize_name(name) for name in distributions.get(top, [top.replace("_", "-")])}
        if not names & known.keys():
            missing[top] = sorted(files)[:3]
    assert missing == {}


def test_tested_versions_are_among_the_declared_ones() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    pinned = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", constraints, re.MULTILINE)
    exact: dict[str, str] = {canonicalize_name(name): found for name, found in pinned}
    wrong = {
        name: exact[name]
        for name, requirement in declared().items()
        if name in exact and not requirement.specifier.contains(exact[name])
    }
    assert wrong == {}
    needed = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    assert needed <= exact.keys() | {"perennial"}


@pytest.mark.parametrize("name", ["torch", "torchvision", "numpy", "flwr"])
def test_installed_versions_are_among_the_declared_ones(name: str) -> None:
    assert declared()[name].specifier.contains(version(name).partition("+")[0])


def test_versions_are_ranges_and_python_is_311_to_313() -> None:
    assert not [line for line in PROJECT["dependencies"] if "==" in line]
    python = SpecifierSet(PROJECT["requires-python"])
    allowed = [minor for minor in range(9, 16) if python.contains(f"3.{minor}.1")]
    assert allowed == [11, 12, 13]


def test_the_wheel_has_every_folder_of_the_rooms() -> None:
    """A folder without `__init__.py` is missing from the wheel, and only there."""
    folders = {path.parent for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]


def test_the_version_is_the_same_wherever_it_stands() -> None:
    here = perennial.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == here
    assert f"\nversion: {here}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {here}" in (ROOT / "CHANGELOG.md").read_text()
    for name in (
        "docker/Dockerfile",
        "docs/deploy.md",
        *map(str, (ROOT / "perennial/deploy").rglob("*.yaml")),
    ):
        tags = re.findall(r"perennial-(?:site|operator):(\d+\.\d+\.\d+)", (ROOT / name).read_text())
        assert set(tags) <= {here}, name


PROMISED = ("client", "deploy", "experiments", "models", "privacy", "server", "strategies")
"""Names at the root that users were promised: links into the package."""


def test_the_package_is_a_folder_without_links_and_the_root_links_into_it() -> None:
    listed = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no checkout")
    links = {line.split("\t")[1] for line in listed.stdout.splitlines() if line.startswith("120000")}
    assert links == {*PROMISED}
    assert all((ROOT / name).readlink() == Path("perennial", name) for name in PROMISED)
    context = (ROOT / ".dockerignore").read_text().splitlines()
    assert "!perennial" in context and not {f"!{name}" for name in PROMISED} & {*context}


def test_from_another_folder_the_package_alone_can_be_imported(tmp_path: Path) -> None:
    """An editable install adds `perennial` to the import path, and no other folder of the checkout."""
    code = """
import importlib, perennial, perennial.server.app
for name in ("server", "client", "strategies", "models", "privacy", "deploy", "experiments", "tests"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{name} can be imported")
"""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)


def test_no_file_of_the_product_has_more_than_400_lines() -> None:
    files = [*(ROOT / "perennial").rglob("*.py")]
    assert files and [str(path) for path in files if len(path.read_text().splitlines()) > 400] == []
