"""What a hospital has approved: code and resolved experiment, each with its full SHA-256.

`perennial site approve` writes one record for each experiment of an app. A site reads its experiment from the
app's own file, compares code and experiment with the record, and refuses any other. Nothing of a run's
configuration changes what a site does: a server may still choose name, runs, resume, device and threads, of
which a site uses none.
"""

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from perennial.config.experiment import Experiment, load_experiment
from perennial.config.run import APP_ROOT, RunSettings
from perennial.foundation.block import Block
from perennial.foundation.errors import PolicyRefusal, StateError

CACHES = ("__pycache__",)
INSTALLED_ROOMS = ("foundation", "data", "models", "privacy", "config", "protocol", "learning", "client")
"""What a site runs of an installation that is no app."""


class Approval(Block):
    """One approved experiment of one app.

    app: folder below flower/apps, or '' for the installation itself. bundle: SHA-256 of the .fab file. code:
    SHA-256 of every file of the app. file: of the experiment, from the app's root. experiment: SHA-256 of its
    resolved settings. settings: these, to say what another approval would change.
    """

    app: str
    bundle: str
    code: str
    file: str
    experiment: str
    time: str
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """Of the record's file."""
        return f"{self.experiment[:16]}-{self.code[:16]}.json"


def read_approvals(folder: Path) -> list[Approval]:
    """Every record, oldest first; none without a folder. Raises StateError naming one that is damaged."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(Approval.model_validate_json(path.read_bytes()))
        except (OSError, ValidationError) as error:
            raise StateError(f"{path}: no record of an approval; approve the app again") from error
    return sorted(found, key=lambda approval: approval.time)


@lru_cache(maxsize=1)
def running_code() -> str:
    """SHA-256 of the code that this process runs, computed once for a process."""
    return code_sha256(APP_ROOT)


def code_sha256(root: Path) -> str:
    """SHA-256 over the path and content of every file of an app. root: its package folder.

    Of an installation that is no app, the Python files of the rooms that a site runs.
    """
    whole = hashlib.sha256()
    top, files = _files(root)
    for name, path in sorted((file.relative_to(top).as_posix(), file) for file in files):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        whole.update(f"{content}  {name}\n".encode())
    return whole.hexdigest()


def approved_experiment(settings: RunSettings, approvals: Path) -> Experiment:
    """The experiment of a run, as this site approved it. approvals: folder of records.

    Raises PolicyRefusal naming the key of the run config, the app or the file that was not approved.
    """
    if settings.overrides.strip():
        raise PolicyRefusal(
            f"run config: overrides: found {settings.overrides!r:.80}, allowed none: this site runs the "
            "approved experiment with the settings that it was approved with"
        )
    code = running_code()
    of_code = [approval for approval in read_approvals(approvals) if approval.code == code]
    if not of_code:
        raise PolicyRefusal(
            f"app: its code has SHA-256 {code:.16}..., and no experiment is approved here with that code"
        )
    approval = next((found for found in of_code if found.file == settings.experiment), None)
    if approval is None:
        allowed = ", ".join(sorted({found.file for found in of_code}))
        raise PolicyRefusal(
            f"run config: experiment: found {settings.experiment!r:.80}, approved here: {allowed}"
        )
    experiment = load_experiment(APP_ROOT / approval.file)
    if experiment.digest != approval.experiment:
        raise PolicyRefusal(
            f"experiment: its settings have SHA-256 {experiment.digest:.16}..., approved here "
            f"{approval.experiment:.16}...: the file has changed since, or another version of Perennial "
            "reads it"
        )
    return experiment


def _files(root: Path) -> tuple[Path, Iterator[Path]]:
    """(the folder that paths are told from, the files)."""
    app = root.parent
    if root.name == "perennial" and (app / "pyproject.toml").is_file():
        return app, _plain(app.rglob("*"))
    return root, (path for room in INSTALLED_ROOMS for path in _plain((root / room).rglob("*.py")))


def _plain(paths: Iterator[Path]) -> Iterator[Path]:
    return (path for path in paths if path.is_file() and not set(CACHES) & set(path.parts))
