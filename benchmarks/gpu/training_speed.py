"""Images a second of local training, and whether recorded steps give what steps give as they come.

`python -m benchmarks.gpu.training_speed --device cuda --precision bfloat16 --gpu graphs,benchmark`
prints JSON. It calls what a site calls in its turn: batches, augmentation, loss, optimiser; only the message
around them is not there.
"""

import argparse
import json
import logging
import time
from typing import Any

import numpy as np
import torch

from perennial.config.learner import LearnerConfig
from perennial.data.config import AugmentationConfig
from perennial.learning.batches import TrainingSet
from perennial.learning.device import choose_device
from perennial.learning.precision import use_products_of
from perennial.learning.steps import AS_THEY_COME, Steps, prepare_gpu
from perennial.learning.training import TrainingResult, train
from perennial.models.config import ModelConfig
from perennial.models.factory import build_model
from perennial.models.flat import FlatParameters

CLASSES, SIDE = 100, 32
AUGMENTATION = AugmentationConfig(crop_padding=4, flip=True)


class Remarks(logging.Handler):
    """Keeps what the program says of itself, such as that steps are not recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def samples(count: int, place: torch.device) -> TrainingSet:
    """Random images of CIFAR's size on the device."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, (count, 3, SIDE, SIDE), generator=draw, dtype=torch.uint8)
    y = torch.randint(CLASSES, (count,), generator=draw)
    mean, std = torch.full((3,), 0.5), torch.full((3,), 0.25)
    return TrainingSet(x.to(place), y.to(place), mean.to(place), std.to(place), channels_last=True)


def learner(precision: str, batch: int, epochs: int) -> LearnerConfig:
    """SGD as in pp_fcil_cifar100."""
    return LearnerConfig.model_validate(
        {
            "preset": "none",
            "epochs": epochs,
            "batch_size": batch,
            "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 0.0005},
            "classification": "ce",
            "precision": precision,
            "channels_last": True,
        }
    )


def turn(
    network: str, config: LearnerConfig, data: TrainingSet, steps: Steps
) -> tuple[TrainingResult, float]:
    """(what one turn gives, seconds until the device has done it)."""
    model = build_model(ModelConfig.model_validate({"name": network}), (3, SIDE, SIDE), CLASSES, 1)
    flat = FlatParameters(model.to(data.y.device), channels_last=True)
    wait(data.y.device)
    start = time.perf_counter()
    done = train(config, model, flat, data, np.random.default_rng(1), augmentation=AUGMENTATION, steps=steps)
    wait(data.y.device)
    return done, time.perf_counter() - start


def wait(place: torch.device) -> None:
    """Until the device has nothing to do."""
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of one setting. The first turn warms up; the second is measured."""
    place = choose_device(arguments.device)
    remarks = Remarks()
    logging.getLogger("perennial.site").addHandler(remarks)
    config = learner(arguments.precision, arguments.batch, arguments.epochs)
    use_products_of(config)
    steps = prepare_gpu(arguments.gpu, place)
    data = samples(arguments.images, place)
    turn(arguments.network, config, data, steps)
    done, seconds = turn(arguments.network, config, data, steps)
    plain, _ = turn(arguments.network, config, data, AS_THEY_COME)
    apart = (done.update - plain.update).norm() / plain.update.norm()
    return {
        "images_per_second": round(arguments.images * arguments.epochs / seconds, 1),
        "seconds": seconds,
        "update_apart_from_plain_steps": float(apart),
        "peak_gib": torch.cuda.max_memory_allocated(place) / 2**30 if place.type == "cuda" else None,
        "remarks": remarks.lines,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="float32", choices=("float32", "tf32", "bfloat16"))
    parser.add_argument("--gpu", default="", help="graphs, benchmark, or both with a comma between")
    parser.add_argument("--network", default="resnet18")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--images", type=int, default=25_600)
    parser.add_argument("--epochs", type=int, default=4)
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
