"""A finished run's network as a fixed map: the same features, known by the file's hash; what it rules out."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from perennial.config.experiment import load_experiment
from perennial.config.run import RunSettings
from perennial.deploy.review import _training
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError
from perennial.models.config import ModelConfig
from perennial.models.factory import build_model, network_of
from perennial.models.feature_maps import finished_run
from perennial.models.feature_maps.config import ModelMapConfig
from perennial.models.feature_maps.finished_run import FinishedRun
from perennial.models.feature_maps.fixed import FixedFeatures, build_fixed_features
from perennial.models.incremental import complete_state
from perennial.models.saved import Inputs, load_saved, save_model
from perennial.server.withdrawal import withdraw
from tests.strategies.test_analytic_runs import own_cache, run, sums_of  # noqa: F401

LEARNT: dict[str, Any] = {
    "name": "learnt",
    "seed": 3,
    "data": {"source": "digits", "sites": 2, "samples_limit": 300, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 1},
    "model": {"name": "dual_backbone", "backbone": "mlp", "hidden": [16]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}, "memory": {"per_class": 3}},
    "evaluation": {"federated": False},
}


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learnt")
    path = folder / "learnt.yaml"
    path.write_text(yaml.safe_dump(LEARNT))
    run_in_process(RunSettings(str(path), name="learnt", runs=str(folder), device="cpu"))
    return folder / "learnt" / "model.safetensors"


def features(file: Path, **keys: Any) -> dict[str, Any]:
    return {"name": "features", "features": [{"name": "model", "file": str(file), **keys}]}


def saved(path: Path, model: dict[str, Any], shape: tuple[int, ...], stored: Any = "float32") -> Path:
    network = build_model(ModelConfig.model_validate(model), shape, 3, seed=1, with_weights=False)
    inputs = Inputs(shape, stored, torch.full(shape[:1], 0.4), torch.full(shape[:1], 2.0))
    settings = json.dumps({"name": "hand-made", "model": model, "seed": 1})
    content = complete_state(network)
    save_model(path, content, inputs, ["a", "b", "c"], settings)
    return path


def test_runs_on_the_map_are_exact_and_the_saved_model_needs_no_file(tmp_path: Path, learnt: Path) -> None:
    file = tmp_path / "first.safetensors"
    shutil.copy(learnt, file)
    one = run(tmp_path, "one", model=features(file), data={"sites": 1, "partition": {"kind": "iid"}})
    many = run(tmp_path, "many", model=features(file))
    assert sums_of(one) == sums_of(many) and one["model_sha256"] == many["model_sha256"]
    (fact,) = many["analytic"]["maps"]
    assert fact == {
        "map": "model",
        "run": "learnt",
        "sha256": hashlib.sha256(learnt.read_bytes()).hexdigest(),
    }
    # what the network learnt of ten digits serves, though nothing of it trains here
    assert many["final_accuracy"] > 0.5
    file.unlink()
    finished_run._tensors_of.cache_clear()
    model = load_saved(tmp_path / "runs" / "many" / "model.safetensors").model
    assert isinstance(model.backbone, FixedFeatures) and isinstance(model.backbone.maps[0], FinishedRun)
    inner = load_saved(learnt).model
    assert any(name.startswith("old_backbone") for name in inner.state_dict())
    x = torch.randint(17, (4, 1, 8, 8)).float()
    inputs = load_saved(learnt).inputs
    with torch.no_grad():
        expected = inner.features((x / 255 - inputs.mean.view(1, 1, 1)) / inputs.std.view(1, 1, 1))
        assert torch.equal(model.backbone.maps[0](x), expected)


def test_file_is_known_by_its_hash_and_found_in_the_cache_by_it(
    tmp_path: Path, learnt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "first.safetensors"
    shutil.copy(learnt, file)
    path = tmp_path / "experiment.yaml"
    content = LEARNT | {"model": features(Path("first.safetensors")), "strategy": "analytic"}
    path.write_text(yaml.safe_dump({key: value for key, value in content.items() if key != "learner"}))
    experiment = load_experiment(path)
    found = (experiment.model.features or [None])[0]
    assert isinstance(found, ModelMapConfig) and found.file == str(file) and found.layout is not None
    # where the file lies is nothing that sites agree to; what it holds is
    moved = tmp_path / "elsewhere" / "first.safetensors"
    moved.parent.mkdir()
    shutil.copy(learnt, moved)
    assert (
        load_experiment(path, [f"model.features=[{{name: model, file: {moved}}}]"]).digest
        == experiment.digest
    )
    assert f"the finished run 'learnt', which learnt from its sites; SHA-256 {found.sha256}" in _training(
        experiment
    )
    cache = tmp_path / "own"
    monkeypatch.setenv("PERENNIAL_CACHE", str(cache))
    file.unlink()
    finished_run._tensors_of.cache_clear()
    constants = torch.zeros(1), torch.ones(1)
    with pytest.raises(ConfigError, match="a finished run: .*first.safetensors: cannot be read"):
        build_fixed_features([found], (1, 8, 8), constants, network_of=network_of)
    (cache / "weights").mkdir(parents=True)
    shutil.copy(learnt, cache / "weights" / f"{found.sha256}.safetensors")
    build_fixed_features([found], (1, 8, 8), constants, network_of=network_of)
    file.write_bytes(b"other")
    finished_run._tensors_of.cache_clear()
    with pytest.raises(ConfigError, match="found SHA-256"):
        build_fixed_features([found], (1, 8, 8), constants, network_of=network_of)


@pytest.mark.parametrize(
    ("model", "shape", "stored", "said"),
    [
        ({"name": "mlp"}, (7,), "float32", r"learnt from samples of shape \(7,\), and the data has shape"),
        ({"name": "mlp"}, (1, 8, 8), "float32", "images of numbers in a scale of their own"),
        (
            {"name": "features", "features": [{"name": "random", "width": 4}]},
            (1, 8, 8),
            "uint8",
            "a run on fixed maps, which learnt no features",
        ),
    ],
    ids=["another shape", "no pixels", "fixed maps"],
)
def test_unfit_runs_are_refused_by_name(
    tmp_path: Path, model: dict[str, Any], shape: tuple[int, ...], stored: str, said: str
) -> None:
    file = saved(tmp_path / "model.safetensors", model, shape, stored)
    with pytest.raises(ConfigError, match=said):
        run(tmp_path, "refused", model=features(file))


def test_nobody_is_withdrawn_from_sums_of_learnt_features(tmp_path: Path, learnt: Path) -> None:
    run(tmp_path, "whole", model=features(learnt))
    with pytest.raises(ConfigError, match="learnt from samples that may be those to withdraw"):
        withdraw(tmp_path / "runs" / "whole", "site-1")
