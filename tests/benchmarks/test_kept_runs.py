"""A run of a table that is stopped goes on in its folder, to the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.grid import run_job
from benchmarks.kept_features import kept_features
from benchmarks.table import Row
from benchmarks.tables.cifar100 import TABLES
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.models.feature_maps.pretrained import Pretrained

SMALL = (
    "data.samples_limit=200",
    "tasks={count: 2, order: seeded, rounds: 2}",
    "model={name: mlp, hidden: [8]}",
)


def test_a_stopped_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    row = Row("small", "replay_digits", SMALL)
    whole = run_job(row.file, row, 5, "cpu").summary

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 3:
            raise KeyboardInterrupt

    settings = RunSettings(str(row.file), ";".join((*SMALL, "seed=5")), "kept", str(tmp_path), device="cpu")
    with pytest.raises(KeyboardInterrupt):
        run_in_process(settings, listener=stop)
    resumed = run_job(row.file, row, 5, "cpu", tmp_path / "kept").summary
    assert resumed["model_sha256"] == whole["model_sha256"]
    assert resumed["rounds"] == whole["rounds"] == 4


def test_both_arms_have_the_same_data_memory_rounds_and_optimiser() -> None:
    replay, full = (row.load(1000) for row in TABLES["cifar100_resnet20"].rows[:2])
    assert (replay.data, replay.tasks) == (full.data, full.tasks)
    assert replay.learner.memory == full.learner.memory
    assert replay.learner.optimizer == full.learner.optimizer
    assert replay.data.samples_limit is None and replay.data.validation_fraction == 0
    assert replay.model.name == full.model.backbone and full.model.name == "dual_backbone"


class Counted(nn.Module):
    """Means of colours, and how many images they were asked for."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return x.mean(dim=(2, 3))


def test_each_image_goes_through_a_network_once_and_keeps_its_features() -> None:
    images = torch.randint(0, 256, (6, 3, 5, 4), generator=torch.Generator().manual_seed(3)).float()
    network = Counted()
    fixed = Pretrained(network, None, "counted", (), (3, 5, 4))
    expected, whole = fixed(images), Pretrained.forward
    network.seen = 0
    with kept_features():
        assert torch.equal(fixed(images[:4]), expected[:4])
        assert torch.equal(fixed(images[[5, 2, 4, 5]]), expected[[5, 2, 4, 5]])
        assert network.seen == 6, "image 5 is there twice in one batch, and was computed once"
        assert torch.equal(fixed(images.flip(3)), fixed(images.flip(3)))
        assert network.seen == 12
    assert Pretrained.forward is whole
    fixed(images)
    assert network.seen == 18
