"""The cost of training before it starts: how many samples, how many operations."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.training_cost import trained_samples, training_cost
from perennial.config.experiment import Experiment, load_experiment

SMALL: dict[str, Any] = {
    "name": "small",
    "data": {
        "source": "digits",
        "sites": 2,
        "samples_limit": 60,
        "partition": {"kind": "iid"},
        "validation_fraction": 0.0,
    },
    "tasks": {"count": 2, "rounds": [3, 4]},
    "model": {"name": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "epochs": 2, "optimizer": {"lr": 0.05}},
}
PIXELS, HIDDEN, CLASSES = 64, 8, 10
FORWARD = 2 * (PIXELS * HIDDEN + HIDDEN * CLASSES)
TRAINING = 3 * FORWARD - 2 * PIXELS * HIDDEN
"""The inputs need no gradient."""


def small(folder: Path, **changes: Any) -> Experiment:
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    return load_experiment(path)


def test_samples_are_counted_by_rounds_epochs_and_exemplars(tmp_path: Path) -> None:
    plain, shape = trained_samples(small(tmp_path))
    assert shape == (1, 8, 8)
    # 60 samples, half of the classes in each task
    assert 2 * 3 * 60 < plain < 2 * 4 * 60
    learner = SMALL["learner"] | {"memory": {"per_class": 1}}
    kept, _ = trained_samples(small(tmp_path, learner=learner))
    # one exemplar of five old classes at each of two sites, four rounds of two epochs
    assert kept - plain == 5 * 2 * 4 * 2


def test_operations_by_hand(tmp_path: Path) -> None:
    plain = small(tmp_path)
    samples, _ = trained_samples(plain)
    assert training_cost(plain, "cpu").operations == pytest.approx(samples * TRAINING)
    taught = small(tmp_path, learner=SMALL["learner"] | {"distillation": {}})
    assert training_cost(taught, "cpu").operations == pytest.approx(samples * (TRAINING + FORWARD))


def test_a_dual_backbone_pays_for_its_frozen_half(tmp_path: Path) -> None:
    plain = training_cost(small(tmp_path), "cpu").operations
    dual = {"name": "dual_backbone", "backbone": "mlp", "hidden": [8]}
    assert training_cost(small(tmp_path, model=dual), "cpu").operations > 1.2 * plain
