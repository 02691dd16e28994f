"""Runs of the closed form: the same sums and the same model however samples, sites and tasks are dealt."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError
from perennial.models.saved import load_saved

EXPERIMENT: dict[str, Any] = {
    "name": "analytic",
    "seed": 3,
    "data": {
        "source": "digits",
        "sites": 4,
        "samples_limit": 600,
        "validation_fraction": 0.1,
        "partition": {"kind": "dirichlet", "alpha": 0.5, "min_samples": 1},
    },
    "tasks": {"count": 5, "rounds": 1},
    "model": {"name": "features", "features": [{"name": "random", "width": 60}]},
    "strategy": {"name": "analytic", "head": "ridge", "shrinkage": 0.01},
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERENNIAL_CACHE", str(tmp_path / "cache"))


def experiment(**changes: Any) -> dict[str, Any]:
    content = json.loads(json.dumps(EXPERIMENT))
    for key, value in changes.items():
        same = isinstance(value, dict) and isinstance(content.get(key), dict)
        if same and value.get("name") in (None, content[key].get("name")):
            content[key] |= value
        else:
            content[key] = value
    return content


def run(folder: Path, name: str, workers: int = 1, resume: str = "", **changes: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(experiment(**changes)))
    settings = RunSettings(str(path), name=name, runs=str(folder / "runs"), device="cpu", resume=resume)
    return run_in_process(settings, workers)  # pyright: ignore[reportReturnType]


def sums_of(summary: dict[str, Any]) -> str:
    return summary["analytic"]["sums_sha256"]


@pytest.fixture(scope="module")
def central(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All samples in one place, in five tasks."""
    return run(tmp_path_factory.mktemp("central"), "one", data={"sites": 1, "partition": {"kind": "iid"}})


@pytest.mark.parametrize(
    ("sites", "partition"),
    [
        (5, {"kind": "iid"}),
        (5, {"kind": "dirichlet", "alpha": 0.1, "min_samples": 1}),
        (12, {"kind": "iid"}),
        (8, {"kind": "class_subset", "classes_per_site": 2}),
    ],
    ids=["iid", "skewed", "twelve", "class subset"],
)
def test_any_division_gives_the_centralised_sums_and_model(
    tmp_path: Path, central: dict[str, Any], sites: int, partition: dict[str, Any]
) -> None:
    summary = run(tmp_path, "divided", data={"sites": sites, "partition": partition})
    assert sums_of(summary) == sums_of(central)
    assert summary["model_sha256"] == central["model_sha256"]
    assert summary["accuracy_matrix"] == central["accuracy_matrix"]


def test_any_number_of_workers_gives_the_same(tmp_path: Path, central: dict[str, Any]) -> None:
    summary = run(tmp_path, "workers", workers=2)
    assert (sums_of(summary), summary["model_sha256"]) == (sums_of(central), central["model_sha256"])


def test_any_order_of_arrival_gives_the_same(
    tmp_path: Path, central: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from perennial.engine.grid import InProcessGrid

    push = InProcessGrid.push_messages

    def backwards(self: InProcessGrid, messages: Any) -> Any:
        return reversed(list(push(self, reversed(list(messages)))))

    monkeypatch.setattr(InProcessGrid, "push_messages", backwards)
    assert run(tmp_path, "backwards")["model_sha256"] == central["model_sha256"]


def test_every_increment_is_the_model_of_all_its_tasks_at_once(
    tmp_path: Path, central: dict[str, Any]
) -> None:
    """Ten classes in ten tasks, five, or one: the same sums and the same model in the end."""
    for tasks in ({"count": 10, "rounds": 1}, {"count": 1, "rounds": 1}):
        summary = run(tmp_path, f"tasks-{tasks['count']}", tasks=tasks)
        assert sums_of(summary) == sums_of(central)
        assert summary["model_sha256"] == central["model_sha256"]


def test_a_site_that_was_away_sends_at_its_return(tmp_path: Path, central: dict[str, Any]) -> None:
    away = [{"site": "site-1", "first_round": 2, "last_round": 4}]
    summary = run(tmp_path, "away", absence=away)
    assert sums_of(summary) == sums_of(central)
    assert summary["model_sha256"] == central["model_sha256"]
    # it told every task once, whenever it came
    events = (tmp_path / "runs" / "away" / "events.jsonl").read_text().splitlines()
    rounds = [event for event in map(json.loads, events) if event["event"] == "round"]
    assert ["site-1" in event["participants"] for event in rounds] == [True, False, False, False, True]


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    tmp_path: Path, central: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from perennial.server.curriculum import Curriculum

    finish = Curriculum._finish_task

    def stop(self: Curriculum, task: int) -> None:
        if task == 3:
            raise KeyboardInterrupt
        finish(self, task)

    monkeypatch.setattr(Curriculum, "_finish_task", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "stopped")
    monkeypatch.setattr(Curriculum, "_finish_task", finish)
    summary = run(tmp_path, "stopped", resume="yes")
    assert (sums_of(summary), summary["model_sha256"]) == (sums_of(central), central["model_sha256"])


def test_the_saved_model_is_an_ordinary_one(tmp_path: Path, central: dict[str, Any]) -> None:
    summary = run(tmp_path, "saved")
    folder = tmp_path / "runs" / "saved"
    tensors = load_file(folder / "model.safetensors")
    assert tensors["head.weight"].shape == (10, 60) and tensors["head.weight"].dtype == torch.float32
    saved = load_saved(folder / "model.safetensors")
    from perennial.config.experiment import load_experiment
    from perennial.config.simulation import load_simulated_federation
    from perennial.learning.batches import TrainingSet

    federation = load_simulated_federation(load_experiment(folder / "experiment.yaml"))
    test = federation.test
    assert test is not None
    data = TrainingSet(test.x[test.test], test.y[test.test], federation.mean, federation.std)
    with torch.no_grad():
        predicted = saved.classifier(data.inputs(slice(None))).argmax(dim=1)
    assert float((predicted == data.y).double().mean()) == pytest.approx(summary["final_accuracy"])


@pytest.mark.parametrize(
    "strategy",
    [
        {"head": "gaussian", "shrinkage": "validation"},
        {"head": "ridge", "shrinkage": "validation"},
        {"head": "ridge", "shrinkage": "gcv", "standardise": False},
        {"head": "balanced_ridge", "shrinkage": "gcv"},
    ],
    ids=["gaussian", "validated ridge", "gcv", "balanced"],
)
def test_every_head_learns(tmp_path: Path, strategy: dict[str, Any]) -> None:
    summary = run(
        tmp_path,
        "head",
        data={"validation_fraction": 0.1, "samples_limit": 1400},
        model={"name": "features", "features": [{"name": "random", "width": 200}]},
        strategy={"name": "analytic", **strategy},
    )
    assert summary["final_accuracy"] > 0.85
    assert summary["analytic"]["withdrawable"]
    assert summary["analytic"]["samples"] == 1272  # of 1400, the others validate
    assert list(summary["analytic"]["shrinkage"]) == ["1", "2", "3", "4", "5"]


def test_balanced_ridge_asks_a_task_again_when_its_counts_change(tmp_path: Path) -> None:
    balanced = {"name": "analytic", "head": "balanced_ridge", "shrinkage": 0.1}
    whole = run(tmp_path, "whole", strategy=balanced)
    away = [{"site": "site-2", "first_round": 1, "last_round": 3}]
    returned = run(tmp_path, "returned", strategy=balanced, absence=away)
    assert sums_of(returned) == sums_of(whole)
    assert returned["model_sha256"] == whole["model_sha256"]


def test_each_sites_sums_are_kept_or_not(tmp_path: Path) -> None:
    assert run(tmp_path, "kept")["analytic"]["withdrawable"]
    kept = sorted(path.name for path in (tmp_path / "runs" / "kept" / "statistics").glob("*.safetensors"))
    assert len(kept) == 4 * 5 and kept[0] == "site-0-task-0001.safetensors"
    assert not run(tmp_path, "not", strategy={"keep_sites": False})["analytic"]["withdrawable"]
    assert not (tmp_path / "runs" / "not" / "statistics").exists()
    shutil.rmtree(tmp_path / "runs")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"name": "mlp", "features": None}}, "allowed: features"),
        (
            {"strategy": {"shrinkage": "validation"}, "data": {"validation_fraction": 0.0}},
            "validation_fraction 0",
        ),
        ({"learner": {"preset": "none", "optimizer": {"lr": 0.1}}}, "leave it out"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, "refused", **changes)
