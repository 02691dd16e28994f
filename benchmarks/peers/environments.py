"""A virtual environment for each simulator that has dependencies of its own, made when it is first needed."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "perennial" / "peers"


def python_of(name: str, requirements: Sequence[str], folder: Path = FOLDER) -> Path:
    """The interpreter of an environment with these packages and this environment's PyTorch and NumPy.

    Raises RuntimeError with pip's last words where they cannot be installed; what was begun is made anew the
    next time.
    """
    wanted = [*(f"{own}=={version(own).split('+')[0]}" for own in ("torch", "numpy")), *requirements]
    place = folder / name
    python, done = place / "bin" / "python", place / "installed"
    stamp = hashlib.sha256("\n".join(wanted).encode()).hexdigest()
    if done.exists() and done.read_text() == stamp:
        return python
    folder.mkdir(parents=True, exist_ok=True)
    _run(sys.executable, "-m", "venv", "--clear", str(place))
    _run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted)
    done.write_text(stamp)
    return python


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-1000:]}{done.stderr[-2000:]}")
