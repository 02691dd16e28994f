"""A name in a file, an app, a model or a message is never imported because it stands there."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from perennial.cli.check import check_command
from perennial.cli.evaluate import evaluate
from perennial.cli.export import export_command
from perennial.cli.predict import predict_command
from perennial.config.document import read_document
from perennial.config.experiment import Experiment
from perennial.foundation.errors import PerennialError
from perennial.models.factory import build_model
from perennial.models.saved import Inputs, load_saved, save_model
from perennial.server.report.card import write_card

PLAIN: dict[str, Any] = {
    "name": "stranger",
    "data": {"source": "digits", "sites": 2, "samples_limit": 60},
    "tasks": {"count": 1, "rounds": 1},
    "model": {"name": "mlp", "hidden": [4]},
}


def runs(marker: Path) -> dict[str, Any]:
    """A `model` block that runs a command where its name is imported and its options are passed on."""
    return {"name": "pydoc:pipepager", "options": {"cmd": f"touch {marker}; cat"}}


def with_layout(marker: Path, **changes: Any) -> dict[str, Any]:
    """An experiment on the map of a finished run, whose layout names a function of the standard library."""
    layout = {
        "name": "learnt",
        "model": runs(marker),
        "seed": 1,
        "classes": 10,
        "inputs": {"shape": [1, 8, 8], "mean": [0.0], "std": [1.0]},
        **changes,
    }
    features = [{"name": "model", "sha256": "0" * 64, "layout": layout}]
    return {**PLAIN, "model": {"name": "features", "features": features}, "strategy": "analytic"}


def model_file(path: Path, marker: Path) -> Path:
    """A model file whose metadata name a function that takes the command from the shape of the inputs."""
    settings = {**PLAIN, "seed": 1, "model": {"name": "subprocess:getoutput"}}
    save_model(
        path,
        {"head.weight": torch.zeros(2, 4), "head.bias": torch.zeros(2)},
        Inputs((f"touch {marker}",), "float32", torch.zeros(1), torch.ones(1)),  # type: ignore[arg-type]
        ["a", "b"],
        json.dumps(settings),
    )
    return path


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "ran"


def test_an_app_without_code_runs_none_through_a_layout(tmp_path: Path, marker: Path) -> None:
    document = yaml.safe_dump({**with_layout(marker), "learner": None})
    with pytest.raises(PerennialError):
        experiment = read_document(document, "app", {})
        build_model(experiment.model, (1, 8, 8), 10, 1, with_weights=False)
    assert not marker.exists()


def test_a_strangers_experiment_runs_nothing_when_it_is_checked(tmp_path: Path, marker: Path) -> None:
    path = tmp_path / "stranger.yaml"
    recorded = {"pydoc:pipepager": "0" * 64}
    for content in (
        {**PLAIN, "model": runs(marker)},
        {**PLAIN, "model": runs(marker), "plugins": recorded},
        {**PLAIN, "model": {**runs(marker), "name": "dual_backbone", "backbone": "pydoc:pipepager"}},
        with_layout(marker),
        {**with_layout(marker), "plugins": recorded},
        {**PLAIN, "data": {"source": "pydoc:pipepager", "options": {"cmd": f"touch {marker}"}}},
        {**PLAIN, "strategy": {"name": "pydoc:pipepager", "cmd": f"touch {marker}"}},
        {**PLAIN, "strategy": {"name": "contribution", "base": {"name": "pydoc:pipepager"}}},
    ):
        path.write_text(yaml.safe_dump(content))
        with pytest.raises(PerennialError):
            check_command(path, None)
        assert not marker.exists(), content


def test_a_model_file_runs_nothing(tmp_path: Path, marker: Path) -> None:
    path = model_file(tmp_path / "model.safetensors", marker)
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    for use in (
        lambda: load_saved(path),
        lambda: predict_command(tmp_path, [tmp_path / "x.csv"]),
        lambda: evaluate(tmp_path, tmp_path / "x.csv"),
        lambda: export_command(tmp_path, tmp_path / "exported"),
        lambda: write_card(tmp_path),
    ):
        with pytest.raises(PerennialError):
            use()
        assert not marker.exists()


def test_modules_of_perennial_itself_are_no_plug_ins(tmp_path: Path) -> None:
    for section in (
        {"strategy": {"name": "perennial.strategies.fedavg:FedAvg"}},
        {"model": {"name": "perennial.foundation.files:make_folder", "options": {}}},
        {"data": {"source": "perennial.data.public_sets:load_digits", "sites": 2}},
        {
            "learner": {
                "preset": "none",
                "optimizer": {"lr": 0.1},
                "classification": "perennial.cli.main:main",
            }
        },
    ):
        with pytest.raises(PerennialError):
            Experiment.of(**{**PLAIN, **section})
