"""What protection costs in time: `python -m benchmarks.privacy_cost site`, or `sample`; prints JSON.

site: the rounds of W1 with every update clipped, noised from the secure source and charged to the site's
ledger, over the same rounds without these steps, which are timed inside them. One ratio for each round: two
runs that differ by 2 % cannot be told apart by their own times.
sample: a round of DP-SGD as the learner runs it, over Opacus used directly on the same model, rate and steps,
in turns in one process. Processor time of one thread, so that other work on the machine counts little.
"""

import json
import tempfile
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import typer

import client.handlers
from benchmarks.workloads import write_workload
from client.batches import TrainingSet
from client.private_training import train_privately
from client.release import Told
from config.learner import LearnerConfig, Optimizer
from config.run import RunSettings
from data.config import AugmentationConfig, DataConfig
from data.digits import load_digits
from engine.run import run_in_process
from foundation.streams import stream
from models.config import ModelConfig
from models.flat import FlatParameters
from models.incremental import IncrementalModel
from models.registry import build_model
from privacy.config import PrivacyConfig
from privacy.noise import SecureNoise

WORKLOAD = "w1_private"
REPEATS, SAMPLES, BATCH, RATE = 9, 1437, 32, 32 / 1437
LEARNER = LearnerConfig(epochs=1, batch_size=BATCH, optimizer=Optimizer(lr=0.05))


class Kind(StrEnum):
    site = "site"
    sample = "sample"


def main(kind: Kind) -> None:
    """Measure one of the two and print it."""
    torch.set_num_threads(1)
    typer.echo(json.dumps(_site() if kind is Kind.site else _sample()))


def _site() -> dict[str, Any]:
    """ratios: a round over the same without protection, in processor time; wall_ratios: disk and all."""
    protect = client.handlers.release_update
    spent = [0.0, 0.0]
    rounds: list[tuple[float, float, float, float]] = []
    start = [time.process_time(), time.perf_counter()]

    def timed(*args: Any, **kwargs: Any) -> Told:
        cpu, wall = time.process_time(), time.perf_counter()
        told = protect(*args, **kwargs)
        spent[0] += time.process_time() - cpu
        spent[1] += time.perf_counter() - wall
        return told

    def listener(event: dict[str, Any]) -> None:
        if event["event"] in ("task_started", "round"):
            now = [time.process_time(), time.perf_counter()]
            if event["event"] == "round":
                rounds.append((now[0] - start[0], spent[0], now[1] - start[1], spent[1]))
            start[:], spent[:] = now, [0.0, 0.0]

    client.handlers.release_update = timed
    with tempfile.TemporaryDirectory() as folder:
        experiment = write_workload(WORKLOAD, Path(folder))
        run_in_process(RunSettings(str(experiment), runs=folder, device="cpu"), listener=listener)
    # the first round builds the model and fills caches
    return {
        "ratios": [cpu / (cpu - own) for cpu, own, _, _ in rounds[1:]],
        "wall_ratios": [wall / (wall - own) for _, _, wall, own in rounds[1:]],
    }


def _sample() -> dict[str, Any]:
    source = load_digits(DataConfig(source="digits"))
    data = TrainingSet(source.train.x[:SAMPLES], source.train.y[:SAMPLES], source.mean, source.std)
    _private(data)
    _opacus(data)
    ratios = [_seconds(_private, data) / _seconds(_opacus, data) for _ in range(REPEATS)]
    return {"ratios": ratios, "samples": SAMPLES, "batch": BATCH}


def _model() -> IncrementalModel:
    return build_model(ModelConfig.model_validate({"name": "small_cnn"}), (1, 8, 8), 10, seed=1)


def _seconds(run: Callable[[TrainingSet], None], data: TrainingSet) -> float:
    start = time.process_time()
    run(data)
    return time.process_time() - start


def _private(data: TrainingSet) -> None:
    model = _model()
    privacy = PrivacyConfig(mode="sample", clip_norm=1.0, noise_multiplier=1.0, sample_rate=RATE)
    train_privately(
        LEARNER,
        privacy,
        model,
        FlatParameters(model),
        data,
        SecureNoise(),
        augmentation=AugmentationConfig(),
    )


def _opacus(data: TrainingSet) -> None:
    """The same model, rate and steps by Opacus's own wrappers and noise of PyTorch's generator."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model = GradSampleModule(_model(), loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=BATCH,
        loss_reduction="sum",
    )
    generator = stream(1, "poisson")
    model.train()
    for _ in range(round(1 / RATE) + 1):
        rows = torch.from_numpy((generator.random(len(data)) < RATE).nonzero()[0])
        optimizer.zero_grad()
        F.cross_entropy(model(data.inputs(rows)), data.y[rows], reduction="sum").backward()
        optimizer.step()


if __name__ == "__main__":
    typer.run(main)
