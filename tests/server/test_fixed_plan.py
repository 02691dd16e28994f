"""A folder of a hospital's own images: killed anywhere, a run keeps its tasks, its bits and its rounds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save

from perennial.config import simulation
from perennial.config.run import RunSettings
from perennial.engine.run import load_resumed_settings, run_in_process
from perennial.foundation.errors import ConfigError, StateError
from perennial.server.checkpoint import BEFORE, CHECKPOINT, LATEST
from perennial.server.journal import read_events

CLASSES = "abcdef"


class Killed(BaseException):
    """Stands for SIGKILL: nothing handles it."""


def images(folder: Path, classes: str = CLASSES, per_class: int = 16) -> Path:
    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for index in range(per_class):
            generator = np.random.default_rng([ord(name), index])
            level = 25 + 35 * (ord(name) - ord("a")) + generator.normal(0, 8, (6, 6))
            Image.fromarray(level.clip(0, 255).astype(np.uint8)).save(folder / name / f"{index}.png")
    return folder


def experiment(folder: Path, **changes: Any) -> Path:
    content: dict[str, Any] = {
        "name": "own",
        "data": {"source": "folder", "path": str(images(folder / "images")), "color": "gray", "sites": 2},
        "tasks": {"count": 3, "rounds": 2},
        "model": {"name": "mlp", "hidden": [8]},
        "learner": {
            "preset": "none",
            "optimizer": {"lr": 0.05},
            "memory": {"selection": "random", "per_class": 3},
        },
    }
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump(content | changes))
    return path


def killed_at(settings: RunSettings, line: int) -> bool:
    """Run until the journal has so many lines; whether the run was killed before its end."""
    seen = 0

    def listen(event: dict[str, Any]) -> None:
        nonlocal seen
        seen += event["event"] != "waiting_for"
        if seen == line:
            raise Killed

    simulation.forget_simulated()
    try:
        run_in_process(settings, listener=listen)
    except Killed:
        return True
    return False


def resumed(folder: Path) -> dict[str, Any]:
    simulation.forget_simulated()
    return run_in_process(load_resumed_settings(None, [], None, folder, "cpu"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], int]:
    """(experiment, summary of a run that nothing disturbed, lines of its journal)."""
    folder = tmp_path_factory.mktemp("whole")
    path = experiment(folder)
    summary = run_in_process(RunSettings(str(path), runs=str(folder / "runs")))
    return path, summary, len(read_events(folder / "runs" / "own"))


@pytest.mark.parametrize("part", range(4))
def test_a_kill_at_any_line_of_the_journal_changes_nothing(
    tmp_path: Path, whole: tuple[Path, dict[str, Any], int], part: int
) -> None:
    path, summary, lines = whole
    tried = 0
    for line in range(1 + part, lines + 1, 4):
        runs = tmp_path / str(line)
        assert killed_at(RunSettings(str(path), runs=str(runs)), line)
        tried += 1
        after = resumed(runs / "own")
        assert after["tasks"] == summary["tasks"], f"killed at line {line}"
        assert after["model_sha256"] == summary["model_sha256"], f"killed at line {line}"
        assert after["rounds"] == summary["rounds"] == 6
        assert after["accuracy_matrix"] == summary["accuracy_matrix"]
        rounds = [event["round"] for event in read_events(runs / "own") if event["event"] == "round"]
        assert rounds == [1, 2, 3, 4, 5, 6]
    assert tried >= 3


def test_classes_that_came_are_learnt_after_the_run_is_finished_and_not_before(tmp_path: Path) -> None:
    path = experiment(tmp_path)
    first: dict[str, Any] = run_in_process(RunSettings(str(path), runs=str(tmp_path / "whole")))
    runs = tmp_path / "runs"
    events = [event["event"] for event in read_events(tmp_path / "whole" / "own")]
    assert killed_at(RunSettings(str(path), runs=str(runs)), events.index("task_finished") + 1)
    images(tmp_path / "images", "gh")
    with pytest.raises(StateError, match="g, h came to the data.*not finished.*take them out until"):
        resumed(runs / "own")
    for name in "gh":
        (tmp_path / "images" / name).rename(tmp_path / name)
    after = resumed(runs / "own")
    assert after["tasks"] == first["tasks"] and after["rounds"] == 6
    assert after["model_sha256"] == first["model_sha256"]
    for name in "gh":
        (tmp_path / name).rename(tmp_path / "images" / name)
    assert resumed(runs / "own")["tasks"] == [*first["tasks"], ["g", "h"]], "now it was finished"


@pytest.mark.parametrize("change", ["tasks.count=2", "tasks.rounds=3", "tasks.rounds=[2,2,3]"])
def test_a_finished_run_without_new_classes_refuses_another_plan(
    whole: tuple[Path, dict[str, Any], int], change: str
) -> None:
    folder = whole[0].parent / "runs" / "own"
    with pytest.raises(ConfigError, match="tasks: .* no new class"):
        load_resumed_settings(None, [change], None, folder, "cpu")
    load_resumed_settings(None, ["tasks.rounds=[2,2,2]"], None, folder, "cpu")


def test_a_checkpoint_of_another_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = experiment(tmp_path)
    assert killed_at(RunSettings(str(path), runs=str(tmp_path / "runs")), 6)
    checkpoint = tmp_path / "runs" / "own" / CHECKPOINT
    for file in (LATEST, BEFORE):
        with safe_open(checkpoint / file, framework="pt") as found:
            facts = json.loads(found.metadata()["facts"]) | {"schema": 3}
            tensors = {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118
        (checkpoint / file).write_bytes(save(tensors, {"facts": json.dumps(facts)}))
    with pytest.raises(StateError, match="schema 3, written before Perennial 0.2.0.*finish the run with the"):
        resumed(tmp_path / "runs" / "own")
