"""What a GPU gains, and whether it gives the same bits: `python -m benchmarks.gpu`.

Each item runs in a process of its own, most valuable first, until the minutes are over; each prints one JSON
line and appends it to OUT/gpu.jsonl. `--tiny --device cpu` goes through all items in miniature.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.gpu_federation import time_federation

ROOT = Path(__file__).resolve().parents[1]
LEAST_SECONDS = 15.0
ITEM_SECONDS = 150.0
OUT = Path(os.environ.get("OUT", "build/gpu"))
Found = dict[str, Any]


class Bench:
    """Runs items in processes of their own on a device: `cpu`, `cuda` or `cuda:N`."""

    def __init__(self, device: str, tiny: bool, folder: Path, minutes: float) -> None:
        self.device, self.tiny = device, tiny
        self._folder = folder
        self._end = time.monotonic() + 60 * minutes

    @property
    def seconds_left(self) -> float:
        """Until the minutes are over."""
        return self._end - time.monotonic()

    def run_module(self, *words: object) -> Found:
        """Run `python -m WORDS`: the object on its last line and its seconds, or why it failed."""
        start = time.monotonic()
        command = [sys.executable, "-m", *map(str, words)]
        # a rehearsal may be on a slow machine
        limit = max(1.0, min(ITEM_SECONDS * (4 if self.tiny else 1), self.seconds_left))
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired as error:
            return {"failed": f"not within {error.timeout:.0f} s"}
        if done.returncode:
            return {"failed": done.stderr[-1500:]}
        return json.loads(done.stdout.splitlines()[-1]) | {"process_seconds": time.monotonic() - start}

    def time_rounds(self, workload: str, *options: str, device: str = "", changes: str = "") -> Found:
        """Run a workload of `make bench` in the engine. changes: of the experiment, KEY=VALUE;KEY=VALUE."""
        changed = ";".join(filter(None, [changes, "tasks.rounds=2" if self.tiny else ""]))
        runs = tempfile.mkdtemp(dir=self._folder)
        words = ["benchmarks.engine_run", workload, "--runs", runs, "--device", device or self.device]
        found = self.run_module(*words, *options, *(["--changes", changed] if changed else []))
        return {name: value for name, value in found.items() if name != "model"}

    def run_part(self, name: str, *words: str) -> Found:
        """Run a function of PARTS in a process of its own."""
        tiny = ["--tiny"] if self.tiny else []
        return self.run_module("benchmarks.gpu", "--part", name, "--device", self.device, *tiny, *words)

    def kill_and_resume(self) -> Found:
        """Kill a run on the device in its third round, resume it, and compare it with an undisturbed run."""
        from benchmarks.workloads import write_workload

        runs = Path(tempfile.mkdtemp(dir=self._folder))
        run = [sys.executable, "-m", "perennial.cli.main", "run"]
        words = [
            *run,
            str(write_workload("w1", runs)),
            "--runs",
            str(runs),
            "--device",
            self.device,
            "--name",
        ]
        subprocess.run([*words, "whole"], cwd=ROOT, capture_output=True, check=True)
        journal, until = runs / "cut" / "events.jsonl", time.monotonic() + ITEM_SECONDS
        with subprocess.Popen([*words, "cut"], cwd=ROOT, stdout=subprocess.DEVNULL) as cut:
            while time.monotonic() < until and cut.poll() is None:
                lines = journal.read_text().splitlines() if journal.exists() else []
                if sum('"round"' in line for line in lines) >= 3:
                    break
                time.sleep(0.01)
            was_running = cut.poll() is None
            cut.send_signal(signal.SIGKILL)
        resume = [*run, "--resume", str(runs / "cut"), "--device", self.device]
        subprocess.run(resume, cwd=ROOT, capture_output=True, check=was_running)
        summaries = [json.loads((runs / name / "summary.json").read_text()) for name in ("whole", "cut")]
        same = len({summary["model_sha256"] for summary in summaries}) == 1
        return {"killed_while_running": was_running, "same_bits": same}


def train_images(device: str, tiny: bool, precision: str = "float32", gpu: str = "") -> Found:
    """Images a second of a site's turn, next to the same steps as they come. Random 3 x 32 x 32 images."""
    import numpy as np
    import torch

    from perennial.config.learner import LearnerConfig
    from perennial.data.config import AugmentationConfig
    from perennial.learning.batches import TrainingSet
    from perennial.learning.device import use_products_of
    from perennial.learning.steps import AS_THEY_COME, Steps, prepare_gpu
    from perennial.learning.training import train
    from perennial.models.config import ModelConfig
    from perennial.models.factory import build_model
    from perennial.models.flat import FlatParameters

    count, batch, epochs, network = (64, 32, 2, "small_cnn") if tiny else (12_800, 128, 3, "resnet18")
    place = torch.device(device)
    optimizer = {"name": "sgd", "lr": 0.01, "momentum": 0.9}
    settings = {
        "preset": "none",
        "epochs": epochs,
        "batch_size": batch,
        "optimizer": optimizer,
        "classification": "ce",
    }
    config = LearnerConfig.model_validate({**settings, "precision": precision, "channels_last": True})
    use_products_of(config)
    draw = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, (count, 3, 32, 32), generator=draw, dtype=torch.uint8).to(place)
    y = torch.randint(100, (count,), generator=draw).to(place)
    mean, std = torch.full((3,), 0.5, device=place), torch.full((3,), 0.25, device=place)
    data = TrainingSet(x, y, mean, std, channels_last=True)

    def turn(steps: Steps) -> tuple[torch.Tensor, float]:
        model = build_model(ModelConfig.model_validate({"name": network}), (3, 32, 32), 100, 1)
        flat = FlatParameters(model.to(place), channels_last=True)
        wait_for_device(device)
        start = time.perf_counter()
        augmentation = AugmentationConfig(crop_padding=4, flip=True)
        generator = np.random.default_rng(1)
        done = train(config, model, flat, data, generator, augmentation=augmentation, steps=steps)
        wait_for_device(device)
        return done.update, time.perf_counter() - start

    steps = prepare_gpu(gpu if place.type == "cuda" else "", place)
    turn(steps)
    update, seconds = turn(steps)
    plain, plain_seconds = turn(AS_THEY_COME)
    return {
        "images_per_second": round(count * epochs / seconds),
        "images_per_second_as_steps_come": round(count * epochs / plain_seconds),
        "update_apart": float((update - plain).norm() / plain.norm()),
        "peak_gib": torch.cuda.max_memory_allocated(place) / 2**30 if place.type == "cuda" else None,
        "kept_gib": torch.cuda.memory_reserved(place) / 2**30 if place.type == "cuda" else None,
    }


def compare_sums(device: str, tiny: bool) -> Found:
    """Sufficient statistics of features (N, D) on the processor and on the device: same bits, and seconds."""
    import torch

    from perennial.learning.analytic.statistics import Collector

    rows, width, classes = (500, 64, 10) if tiny else (50_000, 2_560, 100)
    draw = torch.Generator().manual_seed(1)
    x = torch.rand(rows, width, generator=draw)
    x = (x / (1.5 * x.norm(dim=1, keepdim=True)) * 65_536).floor() / 65_536
    y = torch.randint(classes, (rows,), generator=draw)
    found: Found = {}
    hashes = set()
    for name in ("cpu", device):
        features, labels = x.to(name), y.to(name)
        wait_for_device(name)
        start = time.perf_counter()
        collector = Collector(width, range(classes), device=torch.device(name))
        for first in range(0, rows, 4096):
            collector.add(features[first : first + 4096], labels[first : first + 4096])
        hashes.add(collector.finish().sha256)
        found[f"seconds_{name}"] = round(time.perf_counter() - start, 3)
    return found | {"same_bits": len(hashes) == 1}


def read_facts(device: str, tiny: bool) -> Found:
    """The device and the versions."""
    import torch

    from benchmarks.environment import machine, versions

    name = torch.cuda.get_device_name(device) if device != "cpu" else ""
    return {"machine": machine(name), "versions": versions()}


def learn_ten_classes(device: str, tiny: bool) -> Found:
    """ResNet-18 on the first task of CIFAR-100: ten classes, 5 sites, Dirichlet 0.5, rate 0.05, 20 rounds."""
    import yaml

    from benchmarks.cifar100_trained import (
        EXPERIMENT,
        REPLAY,
        SEED_OF_RATES,
        TINY,
        Run,
        Sizes,
        class_order,
        content_of,
    )

    sizes = TINY if tiny else Sizes(rounds=20)
    run = Run(REPLAY, 0.05, SEED_OF_RATES, 1)
    content = content_of(run, sizes, class_order(sizes, run.seed))
    content["model"]["name"] = "resnet18"
    content["learner"] |= {"batch_size": 64, "precision": "bfloat16", "channels_last": True}
    if path := content["data"].get("path"):
        content["data"]["path"] = str((EXPERIMENT.parent / path).resolve())
    with tempfile.TemporaryDirectory() as folder:
        experiment = Path(folder) / "resnet18.yaml"
        experiment.write_text(yaml.safe_dump(content))
        words = ["run", experiment, "--runs", folder, "--name", "learns", "--device", device]
        graphs = ["--gpu", "graphs"] if device != "cpu" else []
        command = [sys.executable, "-m", "perennial.cli.main", *map(str, words), *graphs]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "learns" / "events.jsonl").read_text().splitlines()
        summary = json.loads((Path(folder) / "learns" / "summary.json").read_text())
    losses = [json.loads(line)["train_loss"] for line in lines if '"event": "round"' in line]
    return {
        "accuracy": summary["final_accuracy"],
        "rounds": summary["rounds"],
        "seconds": summary["seconds"],
        "losses": losses,
    }


PARTS: dict[str, Callable[..., Found]] = {
    "ten_classes": learn_ten_classes,
    "facts": read_facts,
    "training": train_images,
    "sums": compare_sums,
    "supernode": time_federation,
}


def wait_for_device(device: str) -> None:
    """Return when the device has nothing left to do."""
    import torch

    if device != "cpu":
        torch.cuda.synchronize(device)


def list_items(bench: Bench) -> dict[str, Callable[[], Found]]:
    """Every item by its name, most valuable first."""
    private = "privacy={mode: sample, clip_norm: 1.0, noise_multiplier: 1.0, sample_rate: 0.2};tasks.rounds=3"
    graphs = ("--gpu", "graphs") if bench.device != "cpu" else ()
    return {
        "facts": lambda: bench.run_part("facts"),
        "supernode, DP-SGD": lambda: bench.run_part("supernode"),
        "resnet18 learns ten classes": lambda: bench.run_part("ten_classes"),
        "w1 on the processor": lambda: bench.time_rounds("w1", device="cpu"),
        "w1": lambda: bench.time_rounds("w1"),
        "w1 again": lambda: bench.time_rounds("w1"),
        "w1 killed and resumed": bench.kill_and_resume,
        "w3, 100 sites in one pass": lambda: bench.time_rounds("w3", "--cohort", "100"),
        "w3, auto, on the processor": lambda: bench.time_rounds("w3", "--cohort", "auto", device="cpu"),
        "sums": lambda: bench.run_part("sums"),
        "training, bfloat16, recorded": lambda: bench.run_part("training", "bfloat16", "graphs,benchmark"),
        "training, float32, recorded": lambda: bench.run_part("training", "float32", "graphs"),
        "w1, recorded": lambda: bench.time_rounds("w1", *graphs),
        "w1, DP-SGD": lambda: bench.time_rounds("w1", changes=private),
    }


def main(
    settings: Annotated[list[str] | None, typer.Argument(help="of a part", hidden=True)] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    tiny: Annotated[bool, typer.Option(help="everything in miniature")] = False,
    minutes: Annotated[float, typer.Option(help="no item is begun later")] = 9.0,
    only: Annotated[str, typer.Option(help="items whose names contain this")] = "",
    out: Annotated[Path, typer.Option(help="folder of gpu.jsonl")] = OUT,
    part: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Run the items and print what each found."""
    if part:
        typer.echo(json.dumps(PARTS[part](device, tiny, *(settings or []))))
        return
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="perennial-gpu-") as folder:
        bench = Bench(device, tiny, Path(folder), minutes)
        for name, run in list_items(bench).items():
            if only not in name or bench.seconds_left < LEAST_SECONDS:
                typer.echo(f"left out: {name}", err=True)
                continue
            try:
                found = run()
            except Exception as error:
                found = {"failed": repr(error)[-600:]}
            typer.echo(line := json.dumps({"item": name, "device": device, **found}))
            with (out / "gpu.jsonl").open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    typer.run(main)
