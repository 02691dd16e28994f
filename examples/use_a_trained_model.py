"""Classify samples with the model of a finished run, which knows its class names and its inputs."""

import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits

from perennial import Experiment, load_run, run

EXPERIMENT = {
    "name": "trained",
    "seed": 1,
    "data": {"source": "digits", "sites": 3, "partition": {"kind": "iid"}},
    "tasks": {"increments": [10], "rounds": 5},
    "model": {"name": "mlp", "hidden": [64]},
    "learner": {"preset": "none", "epochs": 2, "optimizer": {"lr": 0.1, "momentum": 0.9}},
}


def main(folder: Path) -> None:
    """Train, keep nothing but the run's folder, and classify eight digits."""
    run(Experiment.model_validate(EXPERIMENT), runs=folder / "runs")

    model = load_run(folder / "runs" / "trained").model
    images, labels = load_digits(return_X_y=True)
    pixels = torch.from_numpy(images[:8] * (255 / 16)).round().to(torch.uint8).reshape(8, 1, 8, 8)
    confidence, label = model.probabilities(pixels).max(dim=1)
    for true, index, sure in zip(labels, label.tolist(), confidence.tolist(), strict=False):
        print(f"a {true} is taken for a {model.classes[index]} ({sure:.0%})")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
