"""What protection costs in time, as ratios measured in turns in one process.

`python -m benchmarks.privacy_cost` writes benchmarks/results/privacy_cost.json. Processor time of one thread,
so that other work on the machine counts little.

client: the local training of a round of small_cnn (287 samples, 2 epochs) with the update clipped and noised
from the secure source, over the same training without. sample: DP-SGD as the learner runs it, over Opacus
used directly on the same model and batches.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from client.batches import TrainingSet
from client.private_training import train_privately
from client.training import train
from config.learner import LearnerConfig, Optimizer
from data.config import AugmentationConfig, DataConfig
from data.digits import load_digits
from data.samples import Source
from foundation.streams import stream
from models.config import ModelConfig
from models.flat import FlatParameters
from models.incremental import IncrementalModel
from models.registry import build_model
from privacy.config import PrivacyConfig
from privacy.noise import SecureNoise
from privacy.protection import protect_update

RESULT = Path(__file__).resolve().parent / "results" / "privacy_cost.json"
REPEATS, SAMPLES, BATCH, RATE = 7, 1437, 32, 32 / 1437
PROTECTIONS = 20
LEARNER = LearnerConfig(epochs=1, batch_size=BATCH, optimizer=Optimizer(lr=0.05))


def main() -> None:
    """Measure both ratios, print and write them."""
    torch.set_num_threads(1)
    source = load_digits(DataConfig(source="digits"))
    data = TrainingSet(source.train.x[:SAMPLES], source.train.y[:SAMPLES], source.mean, source.std)
    update = torch.randn(len(FlatParameters(_model()).vector))
    results = {
        "client_level_over_unprotected": _client_level(source, update),
        "sample_level_over_opacus": _ratio(lambda: _private(data), lambda: _opacus(data)),
        "parameters": len(update),
        "samples": SAMPLES,
        "batch": BATCH,
        "repeats": REPEATS,
    }
    RESULT.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


def _model() -> IncrementalModel:
    return build_model(ModelConfig.model_validate({"name": "small_cnn"}), (1, 8, 8), 10, seed=1)


def _ratio(ours: Callable[[], None], theirs: Callable[[], None]) -> float:
    """Median over repetitions of the ratio of two runs that follow each other."""
    ours()
    theirs()
    ratios = []
    for _ in range(REPEATS):
        first, second = (_seconds(run) for run in (ours, theirs))
        ratios.append(first / second)
    return statistics.median(ratios)


def _seconds(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def _client_level(source: Source, update: Tensor) -> float:
    """1 + time of one protection / time of one round of a site, medians over repetitions."""
    data = TrainingSet(source.train.x[:287], source.train.y[:287], source.mean, source.std)
    model = _model()
    flat = FlatParameters(model)
    learner = LEARNER.model_copy(update={"epochs": 2})

    def one_round() -> None:
        train(learner, model, flat, data, stream(1, "batches"), augmentation=AugmentationConfig())

    def protections() -> None:
        for _ in range(PROTECTIONS):
            protect_update(update.clone(), 1.0, 1.0, SecureNoise())

    one_round()
    protections()
    rounds, many = ([_seconds(run) for _ in range(REPEATS)] for run in (one_round, protections))
    return 1 + statistics.median(many) / PROTECTIONS / statistics.median(rounds)


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
    main()
