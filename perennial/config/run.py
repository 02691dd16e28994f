"""The settings of one run that are not the experiment: its name, its folder and the machine.

They travel as Flower's run config, so the same settings reach the ServerApp and the
ClientApps in every engine.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perennial.config.document import require_digest
from perennial.config.experiment import Experiment, load_experiment
from perennial.config.yaml_file import read_yaml
from perennial.foundation import plugins
from perennial.foundation.errors import ConfigError, suggest_nearest

APP_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class RunSettings:
    """The settings of one run.

    experiment: path of the experiment's file, absolute or relative to the app's root.
    digest: SHA-256 of the experiment's settings, by which a site finds what it approved; '' where nobody
    approves anything.
    overrides: KEY=VALUE, separated by semicolons; or a JSON list of such settings, whose
    values may hold semicolons.
    name: of the run folder; '' takes the experiment's name.
    runs: the folder that holds the run folders.
    resume: 'yes' to continue the run folder of that name, otherwise ''.
    device: auto, cpu, cuda or cuda:N.
    gpu: graphs, benchmark, or both with a comma between: what makes a GPU faster (learning/steps.py).
    threads: processor threads of each process.
    plugins: installed packages or folders with other people's methods, with a comma between, that may be used
    in addition to those in use already; a site with a site.yaml takes them from there alone.
    """

    experiment: str = "experiments/quickstart.yaml"
    overrides: str = ""
    name: str = ""
    runs: str = "runs"
    resume: str = ""
    device: str = "auto"
    threads: int = 1
    gpu: str = ""
    digest: str = ""
    plugins: str = ""

    @classmethod
    def from_run_config(cls, run_config: Mapping[str, Any]) -> "RunSettings":
        """Read Flower's run config. Raises ConfigError for an unknown key or a value of another type."""
        fields = cls.__dataclass_fields__
        for key, value in run_config.items():
            if key not in fields:
                raise ConfigError(
                    f"run config: unknown key {key!r}{suggest_nearest(key, fields)}; allowed: "
                    f"{', '.join(fields)}"
                )
            expected = int if key == "threads" else str
            if not isinstance(value, expected):
                raise ConfigError(f"run config: {key}: found {value!r}, allowed a {expected.__name__}")
        return cls(**run_config)

    @property
    def path(self) -> Path:
        """Absolute path of the experiment's file.

        A relative one is taken from APP_ROOT, not from the working directory; if there is none there, from
        the first folder on sys.path that has it beside a pyproject.toml (where Flower unpacks an app).
        """
        path = Path(self.experiment)
        if path.is_absolute() or (APP_ROOT / path).exists():
            return APP_ROOT / path
        # an app without code: Perennial is the installed one, and Flower puts the app's folder on the path
        apps = (Path(entry) for entry in sys.path if (Path(entry) / "pyproject.toml").is_file())
        return next((app / path for app in apps if (app / path).is_file()), APP_ROOT / path)

    def load(self) -> Experiment:
        """The experiment with all defaults. Raises ConfigError if these settings name another digest."""
        with plugins.use_also(plugins.parse_names(self.plugins)):
            experiment = load_experiment(self.path, self._split_overrides())
        if self.digest:
            require_digest(experiment, read_yaml(self.path), self.digest, str(self.path))
        return experiment

    def _split_overrides(self) -> list[str]:
        if not self.overrides.lstrip().startswith("["):
            return [part for part in self.overrides.split(";") if part.strip()]
        return _parse_list(self.overrides)

    def folder(self, experiment: Experiment) -> Path:
        """Absolute path of the run's folder."""
        return resolve_runs_folder(self.runs) / (self.name or experiment.name)


def find_experiment(path: Path) -> Path:
    """The file itself, or by a bare name such as `quickstart` the experiment that Perennial brings."""
    shipped = APP_ROOT / "experiments" / f"{path}.yaml"
    return shipped if path.name == str(path) and not path.is_file() and shipped.is_file() else path


def resolve_runs_folder(runs: Path | str) -> Path:
    """Absolute path of the folder that holds run folders."""
    return Path(os.path.abspath(os.path.expanduser(runs)))


@dataclass(frozen=True)
class CohortPlan:
    """How many sites train in one pass; 1: one after the other. note: why it is not the size asked for."""

    size: int = 1
    note: str = ""


def _parse_list(overrides: str) -> list[str]:
    try:
        content = json.loads(overrides)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"run config: overrides: not JSON: {error}") from error
    if not isinstance(content, list) or not all(isinstance(item, str) for item in content):
        raise ConfigError(f"run config: overrides: found {overrides:.80}, allowed a JSON list of KEY=VALUE")
    return content
