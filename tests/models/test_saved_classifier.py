"""What a run's file classifies with is what the run was judged by: the head, or a site's means."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch.nn.modules.module import register_module_parameter_registration_hook
from typer.testing import CliRunner

from perennial.cli.main import app
from perennial.config.experiment import load_experiment
from perennial.config.run import RunSettings
from perennial.config.simulation import load_simulated_federation
from perennial.engine.run import run_in_process
from perennial.foundation.errors import StateError
from perennial.learning.batches import to_float
from perennial.models.saved import SavedModel, find_model_file, load_saved
from perennial.server.run_record import read_run

EXPERIMENT: dict[str, Any] = {
    "name": "means",
    "seed": 2,
    "data": {"source": "digits", "sites": 2, "samples_limit": 240, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "mlp", "hidden": [16]},
    "learner": {
        "preset": "none",
        "optimizer": {"lr": 0.1},
        "memory": {"per_class": 4},
        "classifier": "nearest_mean",
    },
}


def run(folder: Path) -> dict[str, Any]:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT))
    return run_in_process(RunSettings(str(path), runs=str(folder / "runs")))


def predicted(saved: SavedModel, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return saved.classifier(to_float(x, saved.inputs.mean, saved.inputs.std)).argmax(dim=1)


def test_a_site_keeps_a_model_with_its_own_means(tmp_path: Path) -> None:
    summary = run(tmp_path)
    folder = tmp_path / "runs" / "means"
    assert load_saved(folder / "model.safetensors").class_means is None
    judged = [note for note in read_run(folder).notes if "the saved model's head" in note]
    assert len(judged) == 1
    assert f"count {100 * summary['federated_accuracy'][-1]:.1f} %" in judged[0]
    federation = load_simulated_federation(load_experiment(tmp_path / "experiment.yaml"))
    for name, site in federation.sites.items():
        path = find_model_file(folder, name)
        assert path.stat().st_mode & 0o777 == 0o600
        saved = load_saved(path)
        held_out = site.test if len(site.test) else site.validation
        right = (predicted(saved, site.x[held_out]) == site.y[held_out]).double().mean()
        assert float(right) == pytest.approx(summary["sites"][name]["accuracy"], abs=1e-12)


def test_predict_names_a_class_and_says_when_the_head_stands_in(tmp_path: Path) -> None:
    from PIL import Image

    run(tmp_path)
    folder = tmp_path / "runs" / "means"
    test = load_simulated_federation(load_experiment(tmp_path / "experiment.yaml")).test
    assert test is not None
    sample = test.x[test.test[:1]]
    image = tmp_path / "one.png"
    Image.fromarray(sample[0, 0].numpy()).save(image)
    result = CliRunner().invoke(app, ["predict", str(folder), str(image)])
    assert result.exit_code == 0, result.output
    path, name, confidence = result.stdout.strip().split("\t")
    saved = load_saved(folder / "model.safetensors")
    assert path == str(image)
    assert name == saved.classes[int(predicted(saved, sample))]
    assert 0 < float(confidence) <= 1
    assert "by the head" in result.stderr
    own = CliRunner().invoke(app, ["predict", str(folder), str(image), "--site", "site-1"])
    assert own.exit_code == 0
    assert "by the head" not in own.stderr


def test_a_network_that_the_files_tensors_cannot_fill_is_not_built(tmp_path: Path) -> None:
    """64 layers of 268 MB each, by a file of one number."""
    metadata = {
        "experiment": json.dumps({"model": {"name": "mlp", "hidden": [8_192] * 64}, "seed": 0}),
        "classes": '["a", "b"]',
        "inputs": json.dumps({"shape": [2], "mean": [0, 0], "std": [1, 1]}),
    }
    path, built = tmp_path / "model.safetensors", 0
    save_file({"head.bias": torch.zeros(1)}, path, metadata)

    def count(module: torch.nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        nonlocal built
        built += 0 if tensor is None else 1

    refused = pytest.raises(StateError, match="describe a model of more than 33554436 numbers")
    with register_module_parameter_registration_hook(count), refused:
        load_saved(path)
    assert built <= 5, "up to the second layer, whose numbers are none yet"
