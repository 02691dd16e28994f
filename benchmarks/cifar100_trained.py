"""CIFAR-100 that is trained: `python -m benchmarks.cifar100_trained STAGE ...`, with stages 1, 2 and 3.

ResNet-20, 5 sites, Dirichlet 0.5, 10 tasks of 20 rounds of four local epochs, last norms that begin at 0, and
50 exemplars of a class at all sites together. Each run is a process of `perennial run`, goes on where it
stopped, and leaves one file in the folder of results.

1. The first task alone at each rate; below 55 % the protocol is changed before anything else.
2. Each arm at each rate on tasks 1 and 2 with true rounds, another seed, judged on validation samples.
3. Each arm at its rate, seed 1; then seed 2 of the first three. Accuracy after each task.

Stage 3 needs the results of stage 2, and stage 2 those of stage 1. With both, an arm goes on to stage 3 as
soon as its own rates are judged.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENT = ROOT / "perennial" / "experiments" / "cifar100_resnet20.yaml"
RATES = (0.01, 0.02, 0.05, 0.1)
LEAST = 0.55
"""Accuracy on the first task's classes, below which stages 2 and 3 are refused."""
AIMS = {"first ten classes": 0.62, "final, best arm": 0.30}
SEEDS, SEED_OF_RATES = (1, 2), 1000
HELD_OUT = 0.1
"""Share of a site's samples that judge rates in stage 2."""
LONGEST = 360
"""Minutes of the clock after which runs are stopped; they go on at the next start."""

REPLAY, CONTRASTIVE, PP_FCIL, JOINT = "balanced_softmax", "contrastive", "pp_fcil", "joint"
ARMS = (REPLAY, CONTRASTIVE, PP_FCIL, JOINT)
DISTILLATION = {"weight": 1.0, "temperature": 2.0}
TERM = {"weight": 0.1, "temperature": 0.1}
# the paper's weights; no validation samples are held back in stage 3, so quality is the training accuracy
FACTORS = {"name": "multi_factor", "alpha": 0.7, "beta": 0.1, "gamma": 0.1, "delta": 0.1, "quality": "train"}


@dataclass(frozen=True)
class Sizes:
    """How large a run is. tasks, classes_a_task, rounds, epochs; data: changes of the block data."""

    tasks: int = 10
    classes_a_task: int = 10
    rounds: int = 20
    epochs: int = 4
    data: tuple[tuple[str, Any], ...] = ()


TINY = Sizes(
    tasks=2, classes_a_task=2, rounds=1, epochs=1, data=(("source", "digits"), ("samples_limit", 600))
)


@dataclass(frozen=True)
class Run:
    """One run. tasks: how many of the sizes' tasks; held_out: share of samples that judge."""

    arm: str
    rate: float
    seed: int
    tasks: int
    held_out: float = 0.0

    @property
    def name(self) -> str:
        """Of the run's folder and of its file of results."""
        return f"{self.arm}-rate{self.rate:g}-tasks{self.tasks}-seed{self.seed}"


def class_order(sizes: Sizes, seed: int) -> list[str]:
    """All classes of the data in a seed's order, cut to those of the sizes."""
    from perennial.config.experiment import build_experiment
    from perennial.data.sources import load
    from perennial.foundation.streams import stream

    content = _base(sizes)
    found = build_experiment(content, EXPERIMENT.parent, str(EXPERIMENT))
    names = list(load(found.data, seed).classes)
    order = stream(seed, "class-order-of-cifar100-trained").permutation(len(names))
    return [names[place] for place in order[: sizes.tasks * sizes.classes_a_task]]


def _base(sizes: Sizes) -> dict[str, Any]:
    content = yaml.safe_load(EXPERIMENT.read_text())
    content["data"] |= dict(sizes.data)
    if content["data"]["source"] != "pack":
        content["data"].pop("path")
        content["data"].pop("augmentation")
    return content


def content_of(run: Run, sizes: Sizes, classes: list[str]) -> dict[str, Any]:
    """The experiment of a run. classes: all of them in the order in which they come."""
    content = _base(sizes)
    learner = content["learner"]
    learner["epochs"] = sizes.epochs
    learner["optimizer"]["lr"] = run.rate
    taken = classes[: run.tasks * sizes.classes_a_task]
    content |= {"name": run.name, "seed": run.seed}
    content["data"] |= {"classes": taken, "validation_fraction": run.held_out}
    content["tasks"] = {"count": run.tasks, "order": taken, "rounds": sizes.rounds}
    content["evaluation"] = {"federated": False}
    if run.arm in (CONTRASTIVE, PP_FCIL):
        learner["contrastive"] = TERM
    if run.arm == PP_FCIL:
        learner["distillation"] = DISTILLATION
        content["model"] = {"name": "dual_backbone", "backbone": content["model"]["name"]}
        content["strategy"] = FACTORS
    if run.arm == JOINT:
        content["tasks"]["count"] = 1
        learner.pop("memory")
    return content


@dataclass
class Place:
    """Where runs are made and kept. words: further ones of `perennial run`; jobs: runs at the same time."""

    folder: Path
    words: tuple[str, ...]
    jobs: int
    minutes: float = LONGEST
    _free: threading.Semaphore = field(init=False)
    _end: float = field(init=False)

    def __post_init__(self) -> None:
        self._free = threading.Semaphore(self.jobs)
        self._end = time.monotonic() + 60 * self.minutes

    def finish(self, run: Run, sizes: Sizes) -> dict[str, Any] | None:
        """Make a run, or go on with it; returns its result, None where it was stopped before its end."""
        path = self.path_of(run)
        if path.exists():
            return json.loads(path.read_text())
        with self._free:
            if not self._carry_out(self._command(run, sizes), self.folder / "runs" / f"{run.name}.log"):
                return None
        found = self._read_result(run, sizes)
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(describe(run, found), flush=True)
        return found

    def path_of(self, run: Run) -> Path:
        """The file of a run's result."""
        return self.folder / f"{run.name}.json"

    def _command(self, run: Run, sizes: Sizes) -> list[str]:
        runs = self.folder / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "perennial.cli.main", "run", *self.words]
        if (runs / run.name / "checkpoint").exists():
            return [*command, "--resume", str(runs / run.name)]
        path = runs / f"{run.name}.yaml"
        content = content_of(run, sizes, class_order(sizes, run.seed))
        if content["data"].get("path"):
            content["data"]["path"] = _absolute(content["data"]["path"])
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return [*command, str(path), "--runs", str(runs), "--name", run.name, "--overwrite"]

    def _carry_out(self, command: Sequence[str], log: Path) -> bool:
        """Whether the command came to its end in time. Raises SystemExit where it failed."""
        environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
        left = self._end - time.monotonic()
        if left <= 0:
            return False
        with log.open("a") as file:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
            try:
                process.wait(left)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
                return False
        if process.returncode:
            raise SystemExit(f"{log}: ended with {process.returncode}")
        return True

    def _read_result(self, run: Run, sizes: Sizes) -> dict[str, Any]:
        import torch

        from benchmarks.environment import machine, versions

        there = self.folder / "runs" / run.name
        summary = json.loads((there / "summary.json").read_text())
        on_gpu = any(word.startswith("cuda") for word in self.words)
        return {
            "arm": run.arm,
            "rate": run.rate,
            "seed": run.seed,
            "rounds": summary["rounds"],
            "epochs": sizes.epochs,
            "accuracy_by_task": summary["average_accuracy"],
            "final_accuracy": summary["final_accuracy"],
            "forgetting": summary.get("forgetting"),
            "validation": judge_on_validation(there) if run.held_out else None,
            "seconds": summary["seconds"],
            "model_sha256": summary["model_sha256"],
            "options": " ".join(self.words),
            "machine": machine(torch.cuda.get_device_name() if on_gpu else ""),
            "versions": versions(),
        }


def describe(run: Run, found: dict[str, Any]) -> str:
    """A result in one line."""
    by_task = " ".join(f"{accuracy:.1%}" for accuracy in found["accuracy_by_task"])
    validation = f", validation {found['validation']:.1%}" if run.held_out else ""
    return f"{run.name}: {by_task}{validation}, {found['seconds']:.0f} s"


def _absolute(path: str) -> str:
    return str((EXPERIMENT.parent / path).resolve())


def judge_on_validation(folder: Path) -> float:
    """Balanced accuracy of a finished run's model on the samples that its sites held back and never used."""
    import numpy as np

    from perennial.config.experiment import load_experiment
    from perennial.config.simulation import load_simulated_federation
    from perennial.library import load_run

    model = load_run(folder).model
    right: dict[int, list[np.ndarray]] = {}
    for site in load_simulated_federation(load_experiment(folder / "experiment.yaml")).sites.values():
        for rows in site.part("validation").split(500):
            labels = site.y[rows].numpy()
            found = model.probabilities(site.x[rows]).argmax(dim=1).numpy() == labels
            for label in np.unique(labels):
                right.setdefault(int(label), []).append(found[labels == label])
    return float(np.mean([np.concatenate(parts).mean() for parts in right.values()]))


def runs_of_rates(arms: Sequence[str], rates: Sequence[float], sizes: Sizes) -> Iterator[Run]:
    """The runs of stage 2."""
    for arm in arms:
        yield from (Run(arm, rate, SEED_OF_RATES, min(2, sizes.tasks), HELD_OUT) for rate in rates)


def choose_rate(arm: str, rates: Sequence[float], sizes: Sizes, place: Place) -> float:
    """The rate with the best balanced accuracy on validation samples in stage 2."""
    found = {}
    for run in runs_of_rates([arm], rates, sizes):
        if not place.path_of(run).exists():
            raise SystemExit(f"{place.path_of(run).name}: missing; run stage 2 first")
        found[run.rate] = json.loads(place.path_of(run).read_text())["validation"]
    return max(found, key=lambda rate: found[rate])


def carry_out_arm(
    arm: str, stages: Sequence[int], rates: Sequence[float], sizes: Sizes, place: Place
) -> list[dict[str, Any] | None]:
    """Stages 2 and 3 of one arm, as far as they are asked for: each run's result."""
    with ThreadPoolExecutor(len(rates)) as pool:
        found: list[dict[str, Any] | None] = []
        if 2 in stages:
            found = list(pool.map(lambda run: place.finish(run, sizes), runs_of_rates([arm], rates, sizes)))
        if 3 in stages and None not in found:
            rate = choose_rate(arm, rates, sizes, place)
            seeds = SEEDS if arm in ARMS[:3] else SEEDS[:1]
            runs = [Run(arm, rate, seed, sizes.tasks) for seed in seeds]
            found += pool.map(lambda run: place.finish(run, sizes), runs)
    return found


def main() -> None:
    """Make the runs of the stages that are not there, and print what each found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("stages", type=int, choices=(1, 2, 3), nargs="+")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--rounds", type=int, default=Sizes.rounds, help="of a task")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--minutes", type=float, default=LONGEST, help="after which runs are stopped")
    parser.add_argument("--run", default="", help="further words of `perennial run`, e.g. --device cuda")
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks" / "results" / "cifar100_trained")
    parser.add_argument("--tiny", action="store_true", help="digits, two tasks of a round: tries the program")
    given = parser.parse_args()
    sizes, rates = TINY if given.tiny else replace(Sizes(), rounds=given.rounds), tuple(given.rates)
    place = Place(given.folder, tuple(given.run.split()), given.jobs, given.minutes)
    with ThreadPoolExecutor(max(len(rates), len(ARMS))) as pool:
        first = [Run(REPLAY, rate, SEED_OF_RATES, 1) for rate in rates]
        found: list[dict[str, Any] | None] = []
        if 1 in given.stages:
            found += pool.map(lambda run: place.finish(run, sizes), first)
        if 2 in given.stages and not given.tiny:
            paths = [place.path_of(run) for run in first]
            known = [json.loads(path.read_text())["final_accuracy"] for path in paths if path.exists()]
            if (best := max(known, default=0)) < LEAST:
                raise SystemExit(f"stage 1 has {best:.1%}; from {LEAST:.0%} on stage 2 is worth it")
        if set(given.stages) & {2, 3}:
            for of_arm in pool.map(
                lambda arm: carry_out_arm(arm, given.stages, rates, sizes, place), (PP_FCIL, *ARMS[:2], JOINT)
            ):
                found += of_arm
    if None in found:
        raise SystemExit("stopped before the end; start again to go on")
    print("aims: " + ", ".join(f"{name} {value:.0%}" for name, value in AIMS.items()))


if __name__ == "__main__":
    main()
