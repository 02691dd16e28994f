"""CIFAR-100 that is trained: `python -m benchmarks.cifar100_trained STAGE`, with stage 1, 2 or 3.

ResNet-20, 5 sites, Dirichlet 0.5, 10 tasks of 20 rounds of four local epochs, last norms that begin at 0, and
50 exemplars of a class at all sites together. Each run is a process of `perennial run`, goes on where it
stopped, and leaves one file in the folder of results.

1. The first task alone at each rate; below 55 % the protocol is changed before anything else.
2. Each arm at each rate on tasks 1 and 2 with true rounds, another seed, judged on validation samples.
3. Each arm at its rate, seed 1; then seed 2 of the first three. Accuracy after each task.

A stage prints its table. Stage 3 needs the results of stage 2, and stage 2 those of stage 1.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
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
LONGEST = 6 * 3600
"""Seconds of the clock after which a run is stopped; it goes on at the next start."""

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


def finish(
    run: Run, sizes: Sizes, folder: Path, workers: int, longest: float = LONGEST
) -> dict[str, Any] | None:
    """Make a run, or go on with it; returns its result, None where it was stopped before its end."""
    result = folder / f"{run.name}.json"
    if result.exists():
        return json.loads(result.read_text())
    runs = folder / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    there = runs / run.name
    command = [sys.executable, "-m", "perennial.cli.main", "run"]
    if (there / "checkpoint").exists():
        command += ["--resume", str(there)]
    else:
        path = runs / f"{run.name}.yaml"
        content = content_of(run, sizes, class_order(sizes, run.seed))
        if content["data"].get("path"):
            content["data"]["path"] = _absolute(content["data"]["path"])
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        command += [str(path), "--runs", str(runs), "--name", run.name]
    began = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    with (runs / f"{run.name}.log").open("a") as log:
        process = subprocess.Popen(
            [*command, "--workers", str(workers)], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
        try:
            process.wait(longest)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            return None
    if process.returncode:
        raise SystemExit(f"{run.name}: ended with {process.returncode}; see {runs / run.name}.log")
    summary = json.loads((there / "summary.json").read_text())
    found = {
        "arm": run.arm,
        "rate": run.rate,
        "seed": run.seed,
        "rounds": summary["rounds"],
        "accuracy_by_task": summary["average_accuracy"],
        "final_accuracy": summary["final_accuracy"],
        "forgetting": summary.get("forgetting"),
        "validation": judge_on_validation(there) if run.held_out else None,
        "seconds": summary["seconds"],
        "seconds_of_the_last_start": round(time.monotonic() - began),
        "model_sha256": summary["model_sha256"],
    }
    result.write_text(json.dumps(found, indent=1) + "\n")
    return found


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


def runs_of(stage: int, rates: tuple[float, ...], sizes: Sizes, folder: Path) -> Iterator[Run]:
    """The runs of a stage, in the order in which they are made."""
    if stage == 1:
        yield from (Run(REPLAY, rate, SEED_OF_RATES, 1) for rate in rates)
    elif stage == 2:
        tasks = min(2, sizes.tasks)
        yield from (Run(arm, rate, SEED_OF_RATES, tasks, HELD_OUT) for arm in ARMS for rate in rates)
    else:
        chosen = {arm: choose_rate(arm, rates, sizes, folder) for arm in ARMS}
        yield from (Run(arm, chosen[arm], SEEDS[0], sizes.tasks) for arm in ARMS)
        yield from (Run(arm, chosen[arm], SEEDS[1], sizes.tasks) for arm in ARMS[:3])


def choose_rate(arm: str, rates: tuple[float, ...], sizes: Sizes, folder: Path) -> float:
    """The rate with the best balanced accuracy on validation samples in stage 2."""
    found = {}
    for rate in rates:
        path = folder / f"{Run(arm, rate, SEED_OF_RATES, min(2, sizes.tasks), HELD_OUT).name}.json"
        if not path.exists():
            raise SystemExit(f"{path.name}: missing; run stage 2 first")
        found[rate] = json.loads(path.read_text())["validation"]
    return max(found, key=lambda rate: found[rate])


def main() -> None:
    """Make the runs of one stage that are not there, and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("stage", type=int, choices=(1, 2, 3))
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks" / "results" / "cifar100_trained")
    parser.add_argument("--tiny", action="store_true", help="digits, two tasks of a round: tries the program")
    given = parser.parse_args()
    sizes, rates = TINY if given.tiny else Sizes(), tuple(given.rates)
    if given.stage == 2 and not given.tiny:
        first = [given.folder / f"{run.name}.json" for run in runs_of(1, rates, sizes, given.folder)]
        known = [json.loads(path.read_text())["final_accuracy"] for path in first if path.exists()]
        if max(known, default=0) < LEAST:
            raise SystemExit(
                f"stage 1 has {max(known, default=0):.1%}; from {LEAST:.0%} on stage 2 is worth it"
            )
    for run in runs_of(given.stage, rates, sizes, given.folder):
        found = finish(run, sizes, given.folder, given.workers)
        if found is None:
            raise SystemExit(f"{run.name}: stopped after {LONGEST // 3600} hours; start again to go on")
        by_task = " ".join(f"{accuracy:.1%}" for accuracy in found["accuracy_by_task"])
        print(f"{run.name}: {by_task}" + (f", validation {found['validation']:.1%}" if run.held_out else ""))
    print("aims: " + ", ".join(f"{name} {value:.0%}" for name, value in AIMS.items()))


if __name__ == "__main__":
    main()
