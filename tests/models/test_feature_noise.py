"""Features clipped and noised while a model trains, and the turn that asks for it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError
from perennial.models.feature_noise import noised_features
from perennial.strategies.serial_ring import SerialRing
from tests.strategies.ring_grid import services


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    for layer in model:
        assert isinstance(layer, nn.Linear)
        nn.init.ones_(layer.weight)
    return model


def test_each_sample_is_clipped_to_its_own_norm() -> None:
    model = network()
    seen: list[torch.Tensor] = []
    with noised_features(model, "0", 1.0, 0.0, torch.Generator()):
        hook = model[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
        model(torch.tensor([[3.0, 0.0], [0.1, 0.0]]))
        hook.remove()
    # (3, 3) has norm 3 sqrt 2 and is clipped to 1, (0.1, 0.1) is left
    assert seen[0].norm(dim=1).tolist() == pytest.approx([1.0, 0.1 * 2**0.5])
    assert torch.equal(seen[0][1], torch.tensor([0.1, 0.1]))


def test_noise_has_the_deviation_that_is_asked_for_and_ends_with_the_block() -> None:
    model, x = network(), torch.zeros(4000, 2)
    with noised_features(model, "0", 1.0, 0.5, torch.Generator().manual_seed(1)):
        noised = model(x)
    # the sum of two independent draws
    assert float(noised.detach().std()) == pytest.approx(0.5 * 2**0.5, rel=0.05)
    assert not model(x).any()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"feature_clip": 1.0}, "one without the other"),
        ({"feature_noise": 1.0}, "one without the other"),
        ({"feature_clip": 0.0, "feature_noise": 1.0}, "feature_clip: found 0.0"),
        ({"feature_clip": 1.0, "feature_noise": -1.0}, "feature_noise: found -1.0"),
    ],
)
def test_half_a_mechanism_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        SerialRing(**settings)


def test_noise_on_features_is_not_taken_for_protection() -> None:
    private = {
        "privacy": {"mode": "client_local", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5},
        "evaluation": {"federated": False},
    }
    with pytest.raises(ConfigError, match="noise on features is in no account"):
        SerialRing(segments=1, feature_clip=1.0, feature_noise=1.0).attach(services(**private))


def test_a_run_trains_with_the_noise_that_it_names(tmp_path: Path) -> None:
    found = {}
    for name, noise in (("none", {}), ("wide", (1e6, 0.0)), ("noisy", (1.0, 0.5)), ("again", (1.0, 0.5))):
        features = {"feature_clip": noise[0], "feature_noise": noise[1]} if noise else {}
        path = tmp_path / f"{name}.yaml"
        path.write_text(
            yaml.safe_dump(
                {
                    "name": name,
                    "data": {"source": "digits", "sites": 2, "samples_limit": 80}
                    | {"partition": {"kind": "iid"}},
                    "tasks": {"count": 1, "rounds": 1},
                    "model": {"name": "mlp", "hidden": [8]},
                    "learner": {"preset": "none", "optimizer": {"lr": 0.05}},
                    "strategy": {"name": "serial_ring", "segments": 2, "stratify": True, **features},
                }
            )
        )
        found[name] = run_in_process(RunSettings(str(path), runs=str(tmp_path / "runs")))["model_sha256"]
    assert found["none"] == found["wide"], "a clip that no sample reaches, and no noise"
    assert found["noisy"] == found["again"] != found["none"]
