"""Ghost clipping in whole runs: the same model as with a gradient held for each sample."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.privacy.sample_level import PrivateGradient

PRIVACY: dict[str, Any] = {
    "mode": "sample",
    "clip_norm": 0.5,
    "noise_multiplier": 1.0,
    "sample_rate": 0.2,
}


def final_model(folder: Path, name: str, model: dict[str, Any], **privacy: Any) -> dict[str, torch.Tensor]:
    content = {
        "name": name,
        "seed": 5,
        "data": {"source": "digits", "sites": 2, "samples_limit": 200},
        "tasks": {"count": 2, "rounds": 1},
        "model": model,
        "learner": {
            "preset": "none",
            "epochs": 1,
            "batch_size": 16,
            "optimizer": {"lr": 0.05},
            "classification": "ce",
        },
        "privacy": PRIVACY | privacy,
        "evaluation": {"federated": False},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    run_in_process(RunSettings(str(path), runs=str(folder)))
    return load_file(folder / name / "model.safetensors")


@pytest.mark.parametrize(
    "model",
    [{"name": "mlp", "hidden": [512, 512]}, {"name": "small_cnn", "channels": [16, 32]}],
    ids=["linear layers of 300,000 weights", "convolutions"],
)
def test_a_run_with_ghost_clipping_gives_the_same_model(
    tmp_path: Path, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[bool] = []
    direct, ghost = PrivateGradient._direct_sums, PrivateGradient._ghost_sums
    monkeypatch.setattr(PrivateGradient, "_direct_sums", lambda *a: (used.append(False), direct(*a))[1])
    monkeypatch.setattr(PrivateGradient, "_ghost_sums", lambda *a: (used.append(True), ghost(*a))[1])
    plain = final_model(tmp_path, "plain", model)
    assert used and not any(used)
    used.clear()
    in_parts = final_model(tmp_path, "ghost", model, ghost=True, physical_batch=7)
    assert used and all(used)
    assert plain.keys() == in_parts.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(
            in_parts[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
