"""CIFAR-100 that is trained: `python -m benchmarks.cifar100_trained STAGE ...`, with stages 1, 2 and 3.

ResNet-20, 5 sites, Dirichlet 0.5, 10 tasks of 16 rounds of four local epochs, last norms that begin at 0, and
50 exemplars of a class at all sites together. Each run is a process of `perennial run`, goes on where it
stopped, and leaves one line in the file of results, also when the minutes are over before its end.

1. The first task alone at each rate; below 55 % the protocol is changed before anything else.
2. Each arm at each rate on tasks 1 and 2 with true rounds, another seed, judged on validation samples.
3. Each arm at its rate, seed 1; then seed 2 of the first three. Accuracy after each task.

Stage 3 needs the results of stage 2, and stage 2 those of stage 1. With both, an arm goes on to stage 3 as
soon as its own rates are judged. Without a stage the page is written from the file.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.environment import machine, versions
from perennial.foundation.files import replace_file

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cifar100_trained.jsonl"
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
    """How large a run is. tasks, classes_a_task, rounds, epochs; data: changes of the block data.

    TF32, because the deterministic gradients of float32's convolutions are slow on a GPU.
    """

    tasks: int = 10
    classes_a_task: int = 10
    rounds: int = 16
    epochs: int = 4
    batch_size: int = 64
    precision: str = "tf32"
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
        """Of the run's folder and of its line in the results."""
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
    learner |= {"epochs": sizes.epochs, "batch_size": sizes.batch_size, "precision": sizes.precision}
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


Found = dict[str, Any]
BEGAN = ("rounds", "options", "machine", "versions")
"""What the line of a run says of its first rounds where it went on at another machine."""


@dataclass
class Place:
    """Where runs are made and kept. words: further ones of `perennial run`; jobs: runs at the same time."""

    results: Path
    runs: Path
    words: tuple[str, ...] = ()
    jobs: int = 1
    minutes: float = LONGEST
    _free: threading.Semaphore = field(init=False)
    _file: threading.RLock = field(init=False, default_factory=threading.RLock)
    _end: float = field(init=False)

    def __post_init__(self) -> None:
        self._free = threading.Semaphore(self.jobs)
        self._end = time.monotonic() + 60 * self.minutes

    def read(self) -> dict[str, Found]:
        """Run -> its result, as far as it came."""
        with self._file:
            lines = self.results.read_text().splitlines() if self.results.exists() else []
        return {found["run"]: found for found in map(json.loads, lines)}

    def finish(self, run: Run, sizes: Sizes) -> Found:
        """Make a run, or go on with it; returns its result, `finished` or not."""
        found = self.read().get(run.name)
        if found is not None and found["finished"]:
            return found
        with self._free:
            self._carry_out(self._command(run, sizes), self.runs / f"{run.name}.log")
        return self.note(run, sizes)

    def note(self, run: Run, sizes: Sizes) -> Found:
        """Write the result of a run, as far as it has come, to the file of results."""
        found = self._read_result(run, sizes)
        with self._file:
            known = self.read()
            before = known.get(run.name, found)
            if "began" in before:
                found["began"] = before["began"]
            elif before["machine"] != found["machine"]:
                found["began"] = {key: before[key] for key in BEGAN}
            known[run.name] = found
            lines = [json.dumps(known[name]) for name in sorted(known)]
            replace_file(self.results, "".join(f"{line}\n" for line in lines).encode(), mode=0o644)
        print(describe(found), flush=True)
        return found

    def _command(self, run: Run, sizes: Sizes) -> list[str]:
        self.runs.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "perennial.cli.main", "run", *self.words]
        if (self.runs / run.name / "checkpoint").exists():
            return [*command, "--resume", str(self.runs / run.name)]
        path = self.runs / f"{run.name}.yaml"
        content = content_of(run, sizes, class_order(sizes, run.seed))
        if content["data"].get("path"):
            content["data"]["path"] = _absolute(content["data"]["path"])
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return [*command, str(path), "--runs", str(self.runs), "--name", run.name, "--overwrite"]

    def _carry_out(self, command: Sequence[str], log: Path) -> None:
        """Run it until its end, or until the minutes are over. Raises SystemExit where it failed."""
        environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
        with log.open("a") as file:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
            try:
                process.wait(max(0.0, self._end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
                return
        if process.returncode:
            raise SystemExit(f"{log}: ended with {process.returncode}")

    def _read_result(self, run: Run, sizes: Sizes) -> Found:
        import torch

        there = self.runs / run.name
        summary = there / "summary.json"
        ended = json.loads(summary.read_text()) if summary.exists() else {}
        journal = there / "events.jsonl"
        events = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
        rounds = {event["round"]: event["seconds"] for event in events if event["event"] == "round"}
        tasks = {event["task"]: event for event in events if event["event"] == "task_finished"}
        on_gpu = any(word.startswith("cuda") for word in self.words)
        return {
            "run": run.name,
            **{key: getattr(run, key) for key in ("arm", "rate", "seed", "tasks")},
            **{key: getattr(sizes, key) for key in ("epochs", "batch_size", "precision")},
            "finished": bool(ended),
            "rounds": len(rounds),
            "seconds_of_rounds": round(sum(rounds.values())),
            "accuracy_by_task": [round(tasks[task]["average_accuracy"], 4) for task in sorted(tasks)],
            "forgetting": ended.get("forgetting"),
            "validation": judge_on_validation(there) if run.held_out and ended else None,
            "model_sha256": ended.get("model_sha256"),
            "options": " ".join(self.words),
            "machine": machine(torch.cuda.get_device_name() if on_gpu else ""),
            "versions": versions(),
        }


def describe(found: Found) -> str:
    """A result in one line."""
    by_task = " ".join(f"{accuracy:.1%}" for accuracy in found["accuracy_by_task"])
    validation = "" if found["validation"] is None else f", validation {found['validation']:.1%}"
    end = "" if found["finished"] else f", stopped after {found['rounds']} rounds"
    return f"{found['run']}: {by_task}{validation}{end}"


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
    known = place.read()
    found: dict[float, float] = {}
    for run in runs_of_rates([arm], rates, sizes):
        judged = known.get(run.name, {}).get("validation")
        if judged is None:
            raise SystemExit(f"{place.results}: no judged run {run.name}; run stage 2 first")
        found[run.rate] = judged
    return max(found, key=lambda rate: found[rate])


def carry_out_arm(
    arm: str, stages: Sequence[int], rates: Sequence[float], sizes: Sizes, place: Place
) -> list[Found]:
    """Stages 2 and 3 of one arm, as far as they are asked for: each run's result."""
    with ThreadPoolExecutor(len(rates)) as pool:
        found: list[Found] = []
        if 2 in stages:
            found = list(pool.map(lambda run: place.finish(run, sizes), runs_of_rates([arm], rates, sizes)))
        if 3 in stages and all(each["finished"] for each in found):
            rate = choose_rate(arm, rates, sizes, place)
            seeds = SEEDS if arm in ARMS[:3] else SEEDS[:1]
            runs = [Run(arm, rate, seed, sizes.tasks) for seed in seeds]
            found += pool.map(lambda run: place.finish(run, sizes), runs)
    return found


def write_page(known: dict[str, Found]) -> str:
    """The results as Markdown."""
    stages = {1: list[Found](), 2: list[Found](), 3: list[Found]()}
    for found in known.values():
        stages[3 if found["seed"] in SEEDS else min(2, found["tasks"])].append(found)
    lines = [
        "# CIFAR-100 whole, ResNet-20, 5 sites, Dirichlet 0.5, 10 tasks of four local epochs a round",
        "",
        "`python -m benchmarks.cifar100_trained`, stages 2 and 3 with `--rates 0.05 0.1`. All 50,000",
        "training images, at most 50 exemplars of a class at all sites together, SGD with momentum, a cosine",
        "in each task, last norms that begin at 0.",
        "Accuracy on the test images of all classes so far, after each task. The rows differ in what their",
        "name says, and in the rate, which validation samples of seed 1000 chose. `joint` has all classes in",
        "one task, and no memory. TF32 is float32 on a processor.",
    ]
    titles = {
        3: "Stage 3: the arms",
        2: "Stage 2: rates, on two tasks of seed 1000",
        1: "Stage 1: the first task alone, seed 1000",
    }
    for stage, title in titles.items():
        lines += ["", f"## {title}", ""]
        lines += ["| arm | rate | seed | rounds | accuracy after each task | forgetting | validation |"]
        lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
        for found in sorted(stages[stage], key=lambda each: (ARMS.index(each["arm"]), each["seed"])):
            by_task = " ".join(f"{100 * accuracy:.1f}" for accuracy in found["accuracy_by_task"])
            judged = [found["forgetting"], found["validation"]]
            shown = ["-" if value is None else f"{100 * value:.1f}" for value in judged]
            rounds = f"{found['rounds']}{'' if found['finished'] else ', stopped'}"
            if began := found.get("began"):
                rounds += f"; the first {began['rounds']} with `{began['options']}`"
            cells = [found["arm"], f"{found['rate']:g}", found["seed"], rounds, by_task or "-", *shown]
            lines += [f"| {' | '.join(map(str, cells))} |"]
        sizes = {
            f"batches of {each['batch_size']}, {each['precision']}, `{each['options']}`"
            for each in stages[stage]
        }
        hours = sum(each["seconds_of_rounds"] for each in stages[stage]) / 3600
        lines += [
            "",
            f"{'; '.join(sorted(sizes))}; {hours:.1f} hours of rounds, of runs side by side, pauses too.",
        ]
    places = [place for each in known.values() for place in (each, each.get("began")) if place]
    named = sorted({f"{place['machine']}; PyTorch {place['versions']['torch']}" for place in places})
    return "\n".join([*lines, "", *(f"- {name}" for name in named), ""])


def main() -> None:
    """Make the runs of the stages that are not there, and print what each found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("stages", type=int, nargs="*", help="1, 2 and 3; none: the page")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--minutes", type=float, default=LONGEST, help="after which runs are stopped")
    parser.add_argument("--run", default="", help="further words of `perennial run`, e.g. --device cuda")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "cifar100_trained")
    parser.add_argument("--tiny", action="store_true", help="digits, two tasks of a round: tries the program")
    given = parser.parse_args()
    sizes, rates = TINY if given.tiny else Sizes(), tuple(given.rates)
    place = Place(given.results, given.runs, tuple(given.run.split()), given.jobs, given.minutes)
    found: list[Found] = []
    with ThreadPoolExecutor(max(len(rates), len(ARMS))) as pool:
        first = [Run(REPLAY, rate, SEED_OF_RATES, 1) for rate in rates]
        if 1 in given.stages:
            found += pool.map(lambda run: place.finish(run, sizes), first)
        if 2 in given.stages and not given.tiny:
            known = place.read()
            best = max([0.0, *(known[run.name]["accuracy_by_task"][0] for run in first if run.name in known)])
            if best < LEAST:
                raise SystemExit(f"stage 1 has {best:.1%}; from {LEAST:.0%} on stage 2 is worth it")
        if set(given.stages) & {2, 3}:
            for of_arm in pool.map(
                lambda arm: carry_out_arm(arm, given.stages, rates, sizes, place), (PP_FCIL, *ARMS[:2], JOINT)
            ):
                found += of_arm
    if given.results == RESULTS or not given.stages:
        given.results.with_suffix(".md").write_text(write_page(place.read()))
    print("aims: " + ", ".join(f"{name} {value:.0%}" for name, value in AIMS.items()))
    if not all(each["finished"] for each in found):
        raise SystemExit("stopped before the end; start again to go on")


if __name__ == "__main__":
    main()
