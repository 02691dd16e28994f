"""Who is timed: the engine, a plain loop, and other simulators."""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perennial.benchmarks.peers.environments import python_of
from perennial.benchmarks.peers.watch import watched
from perennial.benchmarks.processes import Ended


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
    """`perennial run` without its live lines."""

    workers: int = 1

    def run(self, workload: str, folder: Path, changes: str) -> Ended:
        with tempfile.TemporaryDirectory(dir=folder) as runs:
            arguments = (workload, "--runs", runs, "--workers", str(self.workers), "--changes", changes)
            return watched("-m", "perennial.benchmarks.engine_run", *arguments)


@dataclass
class PlainLoop(Contestant):
    """benchmarks/plain_loop.py."""

    def run(self, workload: str, folder: Path, changes: str) -> Ended:
        return watched("-m", "perennial.benchmarks.plain_loop", workload, "--changes", changes)


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
        return watched("-m", f"perennial.benchmarks.peers.{self.module}", str(folder), python=self.python)


CONTESTANTS: dict[str, Contestant] = {
    "plain PyTorch loop": PlainLoop(simulator=False),
    "Perennial, one worker": Engine(workers=1),
    "Perennial, two workers": Engine(workers=2),
    "pfl-research": Adapter(module="pfl_research", requirements=("pfl==0.6.0",)),
    "fluke": Adapter(module="fluke_federation", requirements=("fluke-fl==0.8.1",)),
    "FedLab": Adapter(module="fedlab_standalone", requirements=("fedlab==1.3.0",)),
    "Flower on Ray": Adapter(module="flower_ray", slow=True),
}
