"""Build the documentation site into `build/site`: `make docs`.

The pages link files beside `docs/` (results, experiments, README.md), and MkDocs takes one folder. So the
pages and what they link are laid out below `build/docs` as they lie in the repository; links then hold in
both. One page for each room is written from the docstrings, and one for each file that a person writes from
its schema. A link that leads nowhere ends the build.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from schema_pages import PAGES as SCHEMA_PAGES
from schema_pages import schema_page

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "perennial"
STAGE, SITE = ROOT / "build" / "docs", ROOT / "build" / "site"
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "CITATION.cff")
LINKED = ("docs", "benchmarks/results", "examples", "experiments")
ROOMS = {
    "foundation": "Errors, random streams, durable files, names",
    "data": "Sources, the division among sites, schedules",
    "models": "Networks that grow, their flat vector, saved models",
    "privacy": "Accountants, clipping, noise, the ledger, attacks",
    "config": "The files that a person writes",
    "protocol": "Messages and their fields",
    "learning": "What trains and measures a model",
    "client": "The site's side",
    "strategies": "Methods",
    "baselines": "Methods of others, as plug-ins",
    "server": "The curriculum, checkpoints, the report",
    "engine": "Runs in one process",
    "deploy": "Real sites",
    "cli": "The command",
}


def main() -> None:
    """Lay out the pages, write the reference, and run MkDocs in strict mode."""
    shutil.rmtree(STAGE, ignore_errors=True)
    for name in PAGES:
        copy(ROOT / name)
    for folder in LINKED:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts:
                copy(path)
    for path in sorted((ROOT / "examples").glob("*.py")):
        copy(path)
    write_reference()
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(SITE)]
    subprocess.run(
        [*command, "--config-file", str(ROOT / "docs" / "mkdocs.yml")], cwd=ROOT, env=environment, check=True
    )
    print(SITE / "index.html")


def copy(path: Path) -> None:
    """Put one file where it lies in the repository, below the stage."""
    to = STAGE / path.relative_to(ROOT)
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, to)


def write_reference() -> None:
    """One page for each room, with the docstrings of its modules."""
    folder = STAGE / "reference"
    folder.mkdir(parents=True)
    for room, what in ROOMS.items():
        lines = [f"# perennial.{room}", "", f"{what}.", ""]
        for path in sorted((PACKAGE / room).rglob("*.py")):
            module = ".".join(("perennial", *path.relative_to(PACKAGE).with_suffix("").parts))
            if path.name != "__init__.py":
                lines += [f"## {module.removeprefix('perennial.')}", "", f"::: {module}", ""]
        (folder / f"{room}.md").write_text("\n".join(lines))
    for name in SCHEMA_PAGES:
        (folder / f"{name}.md").write_text(schema_page(name))
    face = ["# perennial", "", "::: perennial", "    options:", "      show_submodules: false", ""]
    (folder / "index.md").write_text("\n".join(face))


if __name__ == "__main__":
    main()
