"""Runs every command and snippet of README.md, in order, twice: `python docs/run_readme.py [--installed]`.

The README becomes one script, in an empty HOME and a copy of the files that git knows. `--installed` leaves
out the block that installs Perennial, and takes the environment of this Python. Exits with the status of the
first block that fails.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(sh install|sh|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def script_of(page: str, installed: bool = False) -> str:
    """The blocks of a page as one shell script. installed: without the block that installs."""
    parts = ["set -euo pipefail"]
    for number, (kind, text) in enumerate(BLOCK.findall(page), 1):
        if kind == "sh":
            parts.append(text)
        elif kind == "python":
            name = f"snippet_{number}.py"
            parts.append(f"cat > {name} <<'END_OF_SNIPPET'\n{text}END_OF_SNIPPET\npython {name}")
        elif not installed:
            parts.append(text)
    return "\n".join(parts) + "\n"


def copy_checkout(target: Path) -> None:
    """Copy the files that git knows, links as links."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        source, copy = ROOT / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            copy.symlink_to(source.readlink())
        elif source.exists():
            shutil.copy2(source, copy)


def run(checkout: Path, installed: bool) -> int:
    """Run the README of a checkout there; returns the exit status."""
    script = script_of((checkout / "README.md").read_text(), installed)
    with tempfile.TemporaryDirectory() as home:
        environment = {"HOME": home, "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
        environment |= {
            key: os.environ[key] for key in ("PIP_INDEX_URL", "PIP_CONFIG_FILE") if key in os.environ
        }
        if installed:
            environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
            environment["PYTHONPATH"] = str(checkout)
        return subprocess.run(["bash", "-c", script], cwd=checkout, env=environment, check=False).returncode


def main() -> int:
    """Run the README twice in one copy; returns the first status that is not 0."""
    with tempfile.TemporaryDirectory(prefix="perennial-readme-") as folder:
        checkout = Path(folder) / "checkout"
        copy_checkout(checkout)
        statuses = (run(checkout, "--installed" in sys.argv[1:]) for _ in range(2))
        return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main())
