"""A run of a table that is stopped goes on in its folder, to the same bits."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.grid import run_job
from benchmarks.table import Row
from benchmarks.tables.cifar100 import TABLES
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process

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
