"""Classify samples with model.safetensors alone: class names and input facts are inside the file."""

import json
import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits

from perennial.config.run import RunSettings
from perennial.data.augmentation import to_float
from perennial.engine.run import run_in_process
from perennial.models.saved import load_saved

EXPERIMENT = {
    "name": "trained",
    "seed": 1,
    "data": {"source": "digits", "sites": 3, "partition": {"kind": "iid"}},
    "tasks": {"increments": [10], "rounds": 5},
    "model": {"name": "mlp", "hidden": [64]},
    "learner": {"epochs": 2, "optimizer": {"lr": 0.1, "momentum": 0.9}},
}


def main(folder: Path) -> None:
    """Train, forget everything but the file, and classify eight digits."""
    path = folder / "trained.yaml"
    path.write_text(json.dumps(EXPERIMENT))
    run_in_process(RunSettings(str(path), runs=str(folder / "runs")))

    saved = load_saved(folder / "runs" / "trained" / "model.safetensors")
    digits = load_digits()
    pixels = torch.from_numpy(digits.images[:8] * (255 / 16)).round().to(torch.uint8)[:, None]
    inputs = to_float(pixels, saved.inputs.mean, saved.inputs.std)
    with torch.no_grad():
        confidence, label = saved.classifier(inputs).softmax(dim=1).max(dim=1)
    for true, index, sure in zip(digits.target, label.tolist(), confidence.tolist(), strict=False):
        print(f"a {true} is taken for a {saved.classes[index]} ({sure:.0%})")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
