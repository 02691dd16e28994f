"""The wheel in a fresh environment, used from a folder whose own modules have the names of our rooms."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import yaml

import perennial
from benchmarks.flower_simulation import FlowerSimulation
from tests.plugin_package import MODULE, write_sources

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow
EXPERIMENT: dict[str, Any] = {
    "name": "wheel",
    "data": {"source": "digits", "sites": 2, "samples_limit": 200, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 1},
    "model": {"name": "mlp"},
    "learner": {"preset": "none", "optimizer": {"lr": 0.1}},
}
STAGE = (
    "import sys; from pathlib import Path; from perennial.deploy.application import stage_application\n"
    "from perennial.foundation.plugins import parse_names, use_also\n"
    "with use_also(parse_names(','.join(sys.argv[3:]))):\n"
    "    print(stage_application(Path(sys.argv[1]), [], 'staged', Path(sys.argv[2])).digest)"
)


@dataclass(frozen=True)
class Fresh:
    """An environment with the wheel. folder: somebody's own, to work in."""

    wheel: Path
    binaries: Path
    packages: Path
    folder: Path

    def python(self, *arguments: str | Path, path: str = "", fails: bool = False) -> str:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment |= {"PYTHONPATH": path} if path else {}
        done = subprocess.run(
            [str(self.binaries / "python"), *map(str, arguments)],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return (done.stdout + done.stderr).strip()

    def flwr_run(self, experiment: str, work: Path, plugins: str = "") -> dict[str, Any]:
        """The summary of `flwr run` of the app that the wheel makes of an experiment, on Ray's workers."""
        self.python("-c", STAGE, experiment, work / "apps", plugins)
        app = work / "apps" / "staged"
        with FlowerSimulation(work / "simulation", app, self.binaries, beside=self.folder) as simulation:
            done = simulation.run(
                EXPERIMENT["data"]["sites"], {"runs": str(work / "runs"), "plugins": plugins}
            )
            found = [*(work / "runs").glob("*/summary.json")]
            assert found, done.output + simulation.log()
        return json.loads(found[0].read_text())


def build(source: Path, wheels: Path) -> Path:
    """A wheel of a source folder, without the network."""
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(wheels))
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True)
    return next(wheels.glob("*.whl"))


def clean_export(folder: Path) -> Path:
    """What git knows of, as it stands: an old build folder cannot leak into the wheel."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("the wheel is built from what git knows of, and there is no git here")
    for name in listed.stdout.splitlines():
        if not name.startswith(("tests/", "docs/")) and (
            (ROOT / name).is_file() or (ROOT / name).is_symlink()
        ):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def installed(python: Path, wheel: Path) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    subprocess.run([*command, "--quiet", str(wheel)], check=True)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fresh]:
    base = tmp_path_factory.mktemp("wheel")
    wheel = build(clean_export(base / "source"), base / "wheels")
    venv.create(base / "environment", with_pip=False)
    packages = Path(
        sysconfig.get_path("purelib", "venv", {"base": str(base / "environment"), "platbase": "."})
    )
    # the libraries of this environment, but none of its .pth files: an editable install stays behind
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = base / "environment" / "bin" / "python"
    installed(python, wheel)
    for command in distribution("flwr").entry_points.select(group="console_scripts"):
        script = python.with_name(command.name)
        start = f"import sys\nfrom {command.module} import {command.attr}\nsys.exit({command.attr}())\n"
        script.write_text(f"#!{python}\n{start}")
        script.chmod(0o755)
    folder = base / "own"
    for name in ("data", "models", "client"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise ImportError('this is somebody\\'s own')\n")
    (folder / "config.py").write_text("COLOUR = 'blue'\n")
    (folder / "experiment.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    yield Fresh(wheel, base / "environment" / "bin", packages, folder)


def test_the_wheel_holds_the_package_and_its_metadata(fresh: Fresh) -> None:
    names = zipfile.ZipFile(fresh.wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "perennial",
        f"perennial_fl-{perennial.__version__}.dist-info",
    }
    assert "perennial/py.typed" in names and "perennial/library.py" in names
    assert not [name for name in names if "/tests/" in name or "/benchmarks/" in name]


def test_checkout_and_wheel_give_the_same_app(fresh: Fresh, tmp_path: Path) -> None:
    def stage(name: str, path: str = "") -> str:
        said = fresh.python("-c", STAGE, "experiment.yaml", tmp_path / name, path=path).splitlines()
        return next(line for line in said if len(line) == 64 and " " not in line)

    assert stage("wheel") == stage("checkout", str(ROOT))


def test_a_plug_in_package_is_installed_and_used_by_name(
    fresh: Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    wheel = build(write_sources(tmp_path / "source"), tmp_path / "wheels")
    installed(fresh.binaries / "python", wheel)
    path = fresh.folder / "median.yaml"
    path.write_text(yaml.safe_dump({**EXPERIMENT, "name": "median", "strategy": "stepped_median"}))
    refused = fresh.python(fresh.binaries / "perennial", "check", "median.yaml", fails=True)
    assert f"pass --plugins {MODULE};" in refused
    named = ("--plugins", MODULE)
    assert "ok" in fresh.python(fresh.binaries / "perennial", "check", "quickstart")
    assert "ok" in fresh.python(fresh.binaries / "perennial", "check", "median.yaml", *named)
    fresh.python(fresh.binaries / "perennial", "run", "median.yaml", *named)
    stored = yaml.safe_load((fresh.folder / "runs" / "median" / "experiment.yaml").read_text())
    assert stored["strategy"]["name"] == f"{MODULE}:Median"
    assert list(stored["plugins"]) == [f"{MODULE}:Median"]
    summary = json.loads((fresh.folder / "runs" / "median" / "summary.json").read_text())
    there = fresh.flwr_run("median.yaml", tmp_path, MODULE)
    assert (there["engine"], there["model_sha256"]) == ("ray", summary["model_sha256"])


def test_the_wheel_of_a_commit_has_the_same_bytes_wherever_it_is_built(tmp_path: Path) -> None:
    """In another clone, with another umask and other times of its files."""
    clone = tmp_path / "clone"
    made = subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=False)
    if made.returncode:
        pytest.skip("the wheel of a commit needs git, and this is no checkout")
    for path in clone.rglob("*.py"):
        os.utime(path, (0, 0), follow_symlinks=False)
    found = []
    for root, umask in ((ROOT, 0o022), (clone, 0o077)):
        done = subprocess.run(
            [str(root / "docker" / "wheel.sh"), "HEAD", str(tmp_path / f"{umask:o}")],
            env=os.environ | {"PYTHON": sys.executable},
            umask=umask,
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(done.stdout)
    assert found[0] == found[1]
    assert found[0].split()[1].startswith(f"perennial_fl-{perennial.__version__}-")
