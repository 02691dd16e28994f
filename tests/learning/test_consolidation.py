"""Fused features distilled into the new backbone: by hand, one value a sample, when, and what it is for."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from perennial.config.learner import LearnerConfig
from perennial.config.run import RunSettings
from perennial.data.config import AugmentationConfig
from perennial.engine.run import run_in_process
from perennial.foundation.streams import stream
from perennial.learning.batches import TrainingSet
from perennial.learning.losses import compute_feature_distillation
from perennial.learning.private_training import train_privately
from perennial.learning.training import train
from perennial.models.config import ModelConfig
from perennial.models.dual_backbone import DualBackboneModel
from perennial.models.factory import build_model
from perennial.models.flat import FlatParameters
from perennial.models.incremental import IncrementalModel, complete_state
from perennial.privacy.config import PrivacyConfig
from tests.seeded_noise import SeededNoise

DUAL = ModelConfig.model_validate({"name": "dual_backbone", "backbone": "small_cnn"})
SMALL: dict[str, Any] = {
    "name": "small",
    "seed": 2,
    "data": {"source": "digits", "sites": 2, "samples_limit": 200, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "dual_backbone", "backbone": "mlp", "hidden": [16]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}, "memory": {"per_class": 2}},
}


def learner(**parts: Any) -> LearnerConfig:
    settings = {"preset": "none", "epochs": 4, "batch_size": 16, "optimizer": {"lr": 0.05, "momentum": 0.9}}
    return LearnerConfig.model_validate(settings | parts)


def training_set(count: int = 48, classes: int = 4) -> TrainingSet:
    draw = torch.Generator().manual_seed(1)
    labels = torch.arange(count) % classes
    x = torch.randint(0, 60, (count, 1, 8, 8), generator=draw, dtype=torch.uint8)
    for row, label in enumerate(labels.tolist()):
        x[row, 0, 2 * label : 2 * label + 2] += 150
    return TrainingSet(x, labels, torch.full((1,), 0.3), torch.full((1,), 0.3))


def next_task(model: IncrementalModel, classes: int, task: int) -> None:
    previous = {name: value.clone() for name, value in complete_state(model).items()}
    model.grow(classes, stream(1, "head", task))
    model.begin_task(previous)


def second_task(seed: int = 1) -> DualBackboneModel:
    """A model in task 2 whose backbones differ already."""
    model = build_model(DUAL, (1, 8, 8), 2, seed)
    model.begin_task(None)
    next_task(model, 4, 2)
    assert isinstance(model, DualBackboneModel)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.backbone.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))
    return model


# the term


def test_it_pulls_the_new_backbone_and_neither_gate_nor_old_one() -> None:
    model, rows = second_task().train(), torch.arange(10)
    inputs = training_set().inputs(rows)
    new = model.backbone(inputs)
    compute_feature_distillation(new, model.features(inputs)).mean().backward()
    assert model.gate is not None and model.old_backbone is not None
    assert any(p.grad is not None and p.grad.any() for p in model.backbone.parameters())
    assert all(p.grad is None for p in [*model.gate.parameters(), *model.old_backbone.parameters()])


# what it is for


def test_the_jump_at_the_start_of_the_next_task_gets_smaller() -> None:
    jumps = []
    for parts in ({}, {"consolidation": {"weight": 10.0, "share": 1.0}}):
        model, data = second_task(), training_set()
        generator = np.random.default_rng(1)
        flat = FlatParameters(model)
        train(learner(epochs=20, **parts), model, flat, data, generator, augmentation=AugmentationConfig())
        model.eval()
        with torch.no_grad():
            before = model.features(data.inputs(slice(None)))
            next_task(model, 6, 3)
            after = model.eval().features(data.inputs(slice(None)))
        # the new task begins with the new backbone alone, whatever the gate says
        jumps.append(float((after - before).norm() / before.norm()))
    assert jumps[1] < 0.7 * jumps[0], jumps


def test_private_steps_clip_it_with_the_rest_of_a_samples_loss() -> None:
    privacy = PrivacyConfig.model_validate(
        {
            "mode": "sample",
            "clip_norm": 1.0,
            "noise_multiplier": 0.01,
            "sample_rate": 0.5,
        }
    )
    updates = []
    for parts in ({}, {"consolidation": {"weight": 5.0, "share": 1.0}}):
        model = second_task()
        flat = FlatParameters(model)
        source = SeededNoise(stream(1, "noise"))
        done = train_privately(
            learner(**parts), privacy, model, flat, training_set(), source, augmentation=AugmentationConfig()
        )
        updates.append(done.update)
    assert torch.isfinite(updates[1]).all() and not torch.equal(*updates)


# the experiment


def write(folder: Path, **changes: Any) -> str:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    return str(path)


def test_a_run_with_it_differs_from_the_second_task_on(tmp_path: Path) -> None:
    hashes = {}
    for name, parts in {"without": {}, "with": {"consolidation": {"share": 0.5}}}.items():
        for tasks in (1, 2):
            path = write(tmp_path, learner=SMALL["learner"] | parts, tasks={"count": 5, "rounds": 2})
            folder = str(tmp_path / f"{name}-{tasks}")
            overrides = '["tasks.count=5"]' if tasks == 2 else '["tasks.count=1"]'
            summary = run_in_process(RunSettings(path, runs=folder, overrides=overrides))
            hashes[name, tasks] = summary["model_sha256"]
    assert hashes["without", 1] == hashes["with", 1]
    assert hashes["without", 2] != hashes["with", 2]
