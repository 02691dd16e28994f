"""Who is timed: the engine, a plain loop, and other simulators."""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.environments import python_of
from benchmarks.peers.watch import watched
from benchmarks.processes import Ended


@dataclass
class Contestant:
    """A simulator that is timed.

    simulator: False for the plain loop, which can run nothing else.
    slow: takes part in one turn only.
    """

    simulator: bool = True
    slow: bool = False

    def prepare(self, environments: Path) -> None:
        """Whatever must be installed; not timed. Default: nothing."""

    def run(self, workload: str, folder: Path, changes: str) -> Ended:
        """One run, start to exit. folder: of the prepared task. changes: of the workload's experiment."""
        raise NotImplementedError


@dataclass
class Engine(Contestant):
    """`perennial run`. options: of the command."""

    options: Sequence[str] = ()

    def run(self, workload: str, folder: Path, changes: str) -> Ended:
        chosen = [
            *self.options,
            *(word for change in changes.split(";") if change for word in ("--set", change)),
        ]
        with tempfile.TemporaryDirectory(dir=folder) as runs:
            experiment = str(folder / f"{workload}.yaml")
            return watched("-m", "benchmarks.peers.perennial_run", experiment, runs, *chosen)


@dataclass
class PlainLoop(Contestant):
    """benchmarks/plain_loop.py."""

    def run(self, workload: str, folder: Path, changes: str) -> Ended:
        return watched("-m", "benchmarks.plain_loop", workload, "--changes", changes)


@dataclass
class Adapter(Contestant):
    """A module of this package that reads the prepared task.

    requirements: packages of its own environment; () runs it in this one.
    """

    module: str = ""
    requirements: Sequence[str] = ()
    python: Path = Path(sys.executable)

    def prepare(self, environments: Path) -> None:
        if self.requirements:
            self.python = python_of(self.module, self.requirements, environments)

    def run(self, workload: str, folder: Path, changes: str) -> Ended:
        return watched("-m", f"benchmarks.peers.{self.module}", str(folder), python=self.python)


CONTESTANTS: dict[str, Contestant] = {
    "plain PyTorch loop": PlainLoop(simulator=False),
    "Perennial, one worker": Engine(),
    "Perennial, two workers": Engine(options=("--workers", "2")),
    "Perennial, cohorts": Engine(options=("--cohort", "auto")),
    "Perennial, cohorts and two workers": Engine(options=("--cohort", "auto", "--workers", "2")),
    "pfl-research": Adapter(module="pfl_research", requirements=("pfl==0.6.0",)),
    "Flower on Ray": Adapter(module="flower_ray", slow=True),
}
