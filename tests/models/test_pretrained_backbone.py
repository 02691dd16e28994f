"""Networks that were trained elsewhere as backbones of gradient learners."""

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save

from perennial.config.experiment import Experiment
from perennial.config.run import RunSettings
from perennial.config.site import SitePolicy
from perennial.deploy.review import describe_asked
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError
from perennial.models.config import ModelConfig
from perennial.models.factory import build_model
from perennial.models.incremental import IncrementalModel, select_travelling
from perennial.models.saved import load_saved

pytestmark = pytest.mark.skipif(find_spec("timm") is None, reason="needs timm (perennial-fl[pretrained])")
MAP = {"name": "pretrained"}
CONSTANTS = torch.tensor([0.4]), torch.tensor([0.3])


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERENNIAL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, Any]:
    """A small network's weights in a file, as an experiment names them."""
    from perennial.models.feature_maps.weights import build_bare_network, load_weights

    load_weights.cache_clear()
    network = build_bare_network("resnet10t")
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                assert module.running_mean is not None
                module.running_mean.add_(0.01)
                module.weight.fill_(1.0)
    content = save(network.state_dict())
    (tmp_path / "weights.safetensors").write_bytes(content)
    return {
        "network": "resnet10t",
        "weights": str(tmp_path / "weights.safetensors"),
        "sha256": hashlib.sha256(content).hexdigest(),
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "image_size": 32,
        "licence": "none",
    }


def built(weights: dict[str, Any]) -> IncrementalModel:
    config = ModelConfig.model_validate({"name": "pretrained", "features": [MAP | weights]})
    return build_model(config, (1, 8, 8), 4, 1, CONSTANTS)


def test_only_what_learns_travels_and_moves(weights: dict[str, Any]) -> None:
    model = built(weights).train()
    blocks = {name.split(".")[2] for name in select_travelling(model) if name.startswith("backbone.network.")}
    assert blocks == {"conv1", "bn1", "layer1", "layer2", "layer3", "layer4"}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model(torch.randn(4, 1, 8, 8)).square().sum().backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved <= set(select_travelling(model))
    assert not any("running" in name for name in moved), "statistics of a site's batches"
    assert {name.split(".")[2] for name in moved if "network" in name} == blocks


def test_what_does_not_fit_is_refused(weights: dict[str, Any]) -> None:
    config = ModelConfig.model_validate({"name": "pretrained", "features": [MAP | weights]})
    with pytest.raises(ConfigError, match="reads images"):
        build_model(config, (12,), 4, 1, CONSTANTS)
    for content, message in (
        ({"name": "pretrained"}, "needs one map of the name pretrained"),
        ({"name": "pretrained", "features": ["inputs"]}, "needs one map of the name pretrained"),
        ({"name": "mlp", "features": [MAP | weights]}, "allowed with name features or pretrained"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelConfig.model_validate(content)


def test_a_gradient_method_learns_on_it_and_the_model_is_an_ordinary_one(
    weights: dict[str, Any], tmp_path: Path
) -> None:
    content = {
        "name": "tuned",
        "data": {"source": "digits", "sites": 2, "samples_limit": 80, "partition": {"kind": "iid"}},
        "tasks": {"count": 2, "rounds": 1},
        "model": {"name": "pretrained", "features": [MAP | weights]},
        "learner": {
            "preset": "none",
            "optimizer": {"lr": 0.01},
            "batch_size": 16,
            "memory": {"per_class": 2},
            "distillation": {"weight": 1.0},
        },
        "strategy": "fedavg",
    }
    path = tmp_path / "tuned.yaml"
    path.write_text(yaml.safe_dump(content))
    summary = run_in_process(RunSettings(str(path), name="tuned", runs=str(tmp_path), device="cpu"))
    saved = load_saved(tmp_path / "tuned" / "model.safetensors")
    start, end = load_file(weights["weights"]), saved.model.state_dict()
    moved = {
        name for name, tensor in start.items() if not torch.equal(tensor, end[f"backbone.network.{name}"])
    }
    assert {name.split(".")[0] for name in moved} >= {"conv1", "layer1", "layer4"}
    # two sites and two rounds of all parameters, in float32
    sent = sum(t.numel() for t in select_travelling(built(weights)).values())
    assert summary["bytes_up"] == pytest.approx(4 * 4 * sent, rel=0.1)
    words = " ".join(describe_asked(Experiment.model_validate(content), SitePolicy(), None))
    assert "resnet10t, trained elsewhere; licence none" in words and "all of it learns on" in words
