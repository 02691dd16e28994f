"""Whole small runs in process: going on with new classes, and what a folder with a run refuses."""

import json
from pathlib import Path

import pytest
import yaml

from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.errors import StateError

SMALL = {
    "name": "small",
    "seed": 3,
    "data": {"source": "digits", "sites": 3, "samples_limit": 300, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "small_cnn"},
    "learner": {
        "preset": "none",
        "epochs": 1,
        "batch_size": 32,
        "optimizer": {"lr": 0.05, "momentum": 0.9},
        "classification": "balanced_softmax",
        "distillation": {"weight": 1.0},
        "memory": {"per_class": 3},
    },
}


def write(folder: Path, **changes: object) -> str:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    return str(path)


def test_a_finished_run_goes_on_with_new_classes(tmp_path: Path) -> None:
    from perennial.cli.run import run_command

    first = write(tmp_path, data=SMALL["data"] | {"classes": ["0", "1", "2", "3"]})  # type: ignore[operator]
    runs = tmp_path / "runs"
    before = run_in_process(RunSettings(first, runs=str(runs)))
    longer = tmp_path / "longer.yaml"
    data = SMALL["data"] | {"classes": ["0", "1", "2", "3", "4", "5"]}  # type: ignore[operator]
    longer.write_text(yaml.safe_dump(SMALL | {"data": data, "tasks": {"count": 3, "rounds": 2}}))
    run_command(longer, [], None, "", runs, 1, "cpu", runs / "small", None)
    after = json.loads((runs / "small" / "summary.json").read_text())
    assert after["classes"][:4] == before["classes"]
    assert after["accuracy_matrix"][:2] == before["accuracy_matrix"]
    assert len(after["accuracy_matrix"]) == 3
    assert after["rounds"] == 6


def test_a_run_folder_is_not_overwritten_and_a_changed_experiment_is_refused(tmp_path: Path) -> None:
    experiment = write(tmp_path, tasks={"count": 1, "rounds": 1})
    settings = RunSettings(experiment, runs=str(tmp_path / "runs"))
    run_in_process(settings)
    with pytest.raises(StateError, match="holds a run already"):
        run_in_process(settings)
    changed = RunSettings(experiment, "learner.epochs=2", runs=str(tmp_path / "runs"), resume="yes")
    with pytest.raises(StateError, match=r"learner\.epochs"):
        run_in_process(changed)
