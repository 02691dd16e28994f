"""Which of Flower's runs belong to which submitted experiment, although an answer of Flower's may be lost.

Before a run is asked for, its name and the hash of its app are on the disk (apps/NAME.runs.json). A run of
Flower's that has this hash and name, and that no file has, is then adopted. Any other one is unknown here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from perennial.foundation.errors import StateError
from perennial.foundation.files import replace_file

SUFFIX = ".runs.json"


@dataclass(frozen=True)
class FlowerRun:
    """A run as Flower lists it.

    status: such as `running` or `finished:failed`. bundle: SHA-256 of its app. name: that Perennial gave it;
    '' where Flower's list does not say.
    """

    status: str
    bundle: str = ""
    name: str = ""

    @property
    def over(self) -> bool:
        return self.status.startswith("finished")


class RunBook:
    """The record of starts in the operator's folder of apps."""

    def __init__(self, apps: Path) -> None:
        self._apps = apps

    def names(self) -> list[str]:
        """Names of all experiments that were ever asked to run."""
        return sorted(path.name.removesuffix(SUFFIX) for path in self._apps.glob(f"*{SUFFIX}"))

    def path(self, name: str) -> Path:
        """The file of one name; its time is that of the last command that started or stopped a run."""
        return self._apps / f"{name}{SUFFIX}"

    def recorded(self, name: str) -> list[str]:
        """Flower's ids of the starts whose answer arrived, or that were adopted; oldest first."""
        return self._read(name)[1]

    def intend(self, name: str, bundle: str) -> None:
        """Note, before Flower is asked, that a run of this name and app is wanted."""
        self._write(name, bundle, self.recorded(name))

    def note(self, name: str, *runs: str) -> None:
        """Add Flower's ids of starts; without any, note that a run was changed just now."""
        bundle, known = self._read(name)
        self._write(name, bundle, [*known, *(run for run in runs if run not in known)])

    def owners(self, runs: Mapping[str, FlowerRun]) -> dict[str, list[str]]:
        """Flower's ids by name, oldest first, with those that are adopted from Flower's list `runs`."""
        found = {name: self.recorded(name) for name in self.names()}
        taken = {run for ids in found.values() for run in ids}
        for run, facts in runs.items():
            if run not in taken and facts.bundle:
                named = [name for name in found if self._read(name)[0] == facts.bundle]
                named = [name for name in named if facts.name in ("", name)]
                if named:
                    found[named[0]].append(run)
        return found

    def unknown(self, runs: Mapping[str, FlowerRun]) -> dict[str, str]:
        """Status by id of every run of Flower's that goes on and belongs to no name."""
        taken = {run for ids in self.owners(runs).values() for run in ids}
        return {run: facts.status for run, facts in runs.items() if run not in taken and not facts.over}

    def _read(self, name: str) -> tuple[str, list[str]]:
        """(SHA-256 of the app or '', ids). 0.2.0 wrote a list of ids alone."""
        path = self.path(name)
        if not path.is_file():
            return "", []
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(content, dict):
                return str(content["bundle"]), [str(run) for run in content["runs"]]
            return "", [str(run) for run in content]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StateError(f"{path}: no record of a run's starts ({error}); remove it") from error

    def _write(self, name: str, bundle: str, runs: list[str]) -> None:
        content = json.dumps({"bundle": bundle, "runs": runs}).encode()
        replace_file(self.path(name), content, mode=0o644)
