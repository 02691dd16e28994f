"""The runs of a GPU box, most valuable first, each in a process of its own.

A run that a box measured is not measured again, and one that was stopped goes on where its checkpoint is.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKPOINT = "checkpoint"
"""Of a run's folder: without it there is nothing to go on with."""
ROOT = Path(__file__).resolve().parents[2]
GRACE = 60.0
"""Seconds that a run has to stop in, before it is killed."""
COMMAND = "from perennial.cli.main import main; main()"


@dataclass(frozen=True)
class Place:
    """Where runs run. store: data, checkpoints. deadline: of time.monotonic(), by which all is over."""

    store: Path
    device: str
    tiny: bool
    deadline: float

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    @property
    def tuned(self) -> str:
        """What the device may do to be faster."""
        return "" if self.device == "cpu" else "graphs,benchmark"

    def python(self, *words: str) -> str:
        """The output of `python WORDS...`. Raises Unfinished when time is up, RuntimeError when it fails.

        It is interrupted a minute before the deadline, as by Ctrl-C, so that it can keep what it has.
        """
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *_site(self.store)])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            output, errors = process.communicate(timeout=max(1.0, self.left - GRACE))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=GRACE / 2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
            raise Unfinished from None
        if process.returncode:
            raise RuntimeError(f"python {' '.join(words)}: exit code {process.returncode}: {errors[-3000:]}")
        return output


def _site(store: Path) -> list[str]:
    """Where `receive` installed the wheels that were carried, if there are any."""
    return [str(store / "site")] if (store / "site").is_dir() else []


class Unfinished(Exception):
    """Time was up before the run was over."""


@dataclass(frozen=True)
class Item:
    """One run. minutes: that it takes on one large GPU; measure: its figures.

    Raises Unfinished where it needs more time. lasting: it goes on in the next call, so that it starts in
    whatever time is left.
    """

    name: str
    minutes: float
    measure: Callable[[Place], dict[str, Any]]
    lasting: bool = False


def speed(network: str, precision: str, tuned: bool) -> Item:
    """Images a second of local training, batches of 128."""
    how = "recorded steps" if tuned else "plain steps"

    def measure(place: Place) -> dict[str, Any]:
        words = ["--device", place.device, "--precision", precision, "--network", network]
        if tuned and place.tuned:
            words += ["--gpu", place.tuned]
        if place.tiny:
            words += ["--network", "small_cnn", "--images", "64", "--batch", "32", "--epochs", "2"]
        output = place.python("-m", "benchmarks.gpu.training_speed", *words)
        return json.loads(output.splitlines()[-1])

    return Item(f"training {network}, {precision}, {how}", 1.5, measure)


def rounds(workload: str, cohort: int) -> Item:
    """Seconds of a workload's rounds with so many sites in one pass."""

    def measure(place: Place) -> dict[str, Any]:
        folder = place.store / "runs" / f"{workload}-{cohort}-{time.time_ns()}"
        words = [workload, "--runs", str(folder), "--cohort", str(cohort), "--device", place.device]
        if place.tuned:
            words += ["--gpu", place.tuned]
        if place.tiny:
            words += ["--changes", "tasks.rounds=1"]
        output = place.python("-m", "benchmarks.engine_run", *words)
        found = json.loads(output.splitlines()[-1])
        return {key: found[key] for key in ("seconds", "steps", "accuracy", "model_sha256")}

    return Item(f"rounds of {workload}, {cohort} sites in one pass", 1.0, measure)


def experiment(
    file: str,
    seed: int,
    minutes: float,
    tiny: Sequence[str],
    *,
    data: str = "",
    changes: Sequence[str] = (),
    called: str = "",
) -> Item:
    """A whole run of a file in experiments/. data: file in the store that it reads.

    called: what it is, where that is not the file. tiny: (file, changes...) that stand for it in a trial.
    """

    def measure(place: Place) -> dict[str, Any]:
        chosen, *sets = tiny if place.tiny else (file, *changes)
        if data and not place.tiny:
            sets.append(f"data.path={place.store / 'data' / data}")
        runs, name = place.store / "runs", f"{called or file}-{seed}" + ("-tiny" if place.tiny else "")
        words = ["--device", place.device, *(("--gpu", place.tuned) if place.tuned else ())]
        if (runs / name / CHECKPOINT).exists():
            words = ["--resume", str(runs / name), *words]
        else:
            shutil.rmtree(runs / name, ignore_errors=True)
            path = ROOT / "experiments" / f"{chosen}.yaml"
            settings = [word for change in sets for word in ("--set", change)]
            words = [str(path), *settings, "--seed", str(seed), "--name", name, "--runs", str(runs), *words]
        place.python("-c", COMMAND, "run", *words)
        summary = json.loads((runs / name / "summary.json").read_text())
        keys = ("final_accuracy", "average_incremental_accuracy", "forgetting", "seconds", "model_sha256")
        return {key: summary[key] for key in keys}

    return Item(f"{called or file}, seed {seed}", minutes, measure, lasting=True)


TINY = ("tasks.count=2", "tasks.rounds=1", "data.samples_limit=200")
CIFAR = "cifar100.webp.zip"


def pp_fcil(tasks: int, seed: int) -> Item:
    """PP-FCIL on CIFAR-100 at the paper's size."""
    changes, called = (f"tasks.count={tasks}",), f"pp_fcil_cifar100_t{tasks}"
    tiny = ("pp_fcil_digits", *TINY)
    return experiment("pp_fcil_as_published", seed, 60.0, tiny, data=CIFAR, changes=changes, called=called)


AT_224 = "model.features=[{name: pretrained, network: efficientnet_lite0, image_size: 224}]"
SEQUENCE: tuple[Item, ...] = (
    *(
        speed("resnet18", precision, tuned)
        for precision in ("float32", "bfloat16")
        for tuned in (True, False)
    ),
    speed("resnet18", "tf32", True),
    *(rounds(workload, 1) for workload in ("w1", "w2", "w3")),
    *(rounds(workload, 10) for workload in ("w1", "w2", "w3")),
    *(rounds("w3", cohort) for cohort in (50, 100)),
    experiment(
        "analytic_cifar100",
        1,
        8.0,
        ("analytic_digits",),
        data=CIFAR,
        changes=(AT_224,),
    ),
    *(pp_fcil(tasks, seed) for seed in (1, 2, 3) for tasks in (10, 5)),
)


def run_sequence(
    items: Sequence[Item], place: Place, done: set[str], keep: Callable[[str, dict[str, Any]], None]
) -> list[str]:
    """Measure what is not done, in order, and keep each; returns the names of those that remain.

    A run that fails is named and passed over, so that the others get their time; it stays undone.
    """
    for item in items:
        if item.name in done or (item.minutes * 60 > place.left and not (item.lasting or place.tiny)):
            continue
        if place.left < 2 * GRACE:
            break
        try:
            found = item.measure(place)
        except Unfinished:
            print(f"{item.name}: stopped; the next call goes on", flush=True)
            continue
        except (RuntimeError, OSError) as error:
            print(f"{item.name}: failed: {error}", file=sys.stderr, flush=True)
            continue
        keep(item.name, found)
        done.add(item.name)
        print(f"{item.name}: {json.dumps(found)}", flush=True)
    return [item.name for item in items if item.name not in done]
