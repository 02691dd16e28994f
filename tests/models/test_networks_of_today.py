"""Twelve of timm's networks with random weights, at a size that is not their own: maps, runs, export."""

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from perennial import load_run
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.models.feature_maps.config import PretrainedConfig
from perennial.models.feature_maps.fixed import FixedFeatures, build_fixed_features
from perennial.models.feature_maps.pretrained import Pretrained
from perennial.models.feature_maps.weights import build_bare_network

pytestmark = pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")

NETWORKS = (
    "vit_tiny_patch16_224",
    "deit_tiny_patch16_224",
    "vit_small_patch14_dinov2",
    "vit_small_patch14_reg4_dinov2",
    "convnext_atto",
    "convnext_femto",
    "swin_tiny_patch4_window7_224",
    "swin_s3_tiny_224",
    "tf_efficientnet_lite0",
    "efficientnet_b0",
    "resnet10t",
    "resnet18",
)
EXPORTED = ("vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "convnext_atto", "resnet10t")
SIZE = (48, 80)
"""Neither square, nor whole patches of 14 pixels, nor what any of them was made for."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERENNIAL_CACHE", str(tmp_path / "cache"))


def written(name: str, folder: Path) -> dict[str, Any]:
    """A map's keys, beside a file of random weights."""
    torch.manual_seed(0)
    path = folder / f"{name}.safetensors"
    save_file(
        {key: tensor.contiguous() for key, tensor in build_bare_network(name).state_dict().items()}, path
    )
    return {
        "name": "pretrained",
        "network": name,
        "weights": str(path),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "image_size": list(SIZE),
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
    }


def built(keys: dict[str, Any], shape: tuple[int, int, int] = (3, 24, 40)) -> FixedFeatures:
    constants = torch.full(shape[:1], 0.5), torch.full(shape[:1], 0.25)
    return build_fixed_features([PretrainedConfig.model_validate(keys)], shape, constants)


def images_file(folder: Path) -> Path:
    generator = np.random.default_rng(0)
    y = np.arange(60) % 3
    x = generator.integers(0, 100, (60, 24, 40, 3)) + 50 * y[:, None, None, None]
    path = folder / "images.npz"
    np.savez(path, x=x.astype(np.uint8), y=np.array(["a", "b", "c"])[y])
    return path


def experiment(keys: dict[str, Any], folder: Path) -> Path:
    content = {
        "name": "networks",
        "data": {"source": "npz", "path": str(images_file(folder)), "sites": 2, "validation_fraction": 0},
        "tasks": {"count": 1, "rounds": 1},
        "model": {"name": "features", "features": [keys]},
        "strategy": {"name": "analytic"},
        "evaluation": {"federated": False},
    }
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_tokens_are_the_class_s_beside_the_mean_of_the_patches_and_stages_are_blocks(tmp_path: Path) -> None:
    keys = written("vit_tiny_patch16_224", tmp_path)
    plain, staged = built(keys), built(keys | {"stages": 2})
    assert (plain.width, staged.width) == (2 * 192, 4 * 192)
    module = plain.maps[0]
    assert isinstance(module, Pretrained)
    pixels = torch.randint(0, 256, (2, 3, 24, 40)).float()
    resized = torch.nn.functional.interpolate(pixels, size=SIZE, mode="bicubic", align_corners=False)
    network: Any = module.network
    with torch.no_grad():
        tokens = network.forward_features((resized / 255 - 0.5) / 0.5)
        expected = torch.cat([tokens[:, 0], tokens[:, 1:].mean(dim=1)], dim=1)
        assert torch.allclose(module(pixels), expected, atol=1e-5)
        seen: list[torch.Tensor] = []
        module = staged.maps[0]
        assert isinstance(module, Pretrained)
        blocks: Any = module.network.blocks
        hook = blocks[-2].register_forward_hook(lambda *call: seen.append(call[-1]))
        found = module(pixels)
        hook.remove()
    part = torch.nn.functional.normalize(seen[0][:, 1:].mean(dim=1))
    assert torch.allclose(found[:, 384:576], part, atol=1e-5)


def test_images_are_filled_up_to_whole_patches_and_grey_ones_are_read(tmp_path: Path) -> None:
    """48 x 80 pixels are 4 x 6 patches of 14: the last of them lie partly beside the image."""
    keys = written("vit_small_patch14_reg4_dinov2", tmp_path)
    module = built(keys, (1, 24, 40)).maps[0]
    assert isinstance(module, Pretrained)
    network: Any = module.network
    assert network.patch_embed.grid_size == (4, 6) and network.num_prefix_tokens == 5
    with torch.no_grad():
        found = module(torch.rand(2, 1, 24, 40) * 255)
    assert found.shape == (2, 768) and bool(torch.isfinite(found).all())


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_go_through_check_and_run(name: str, tmp_path: Path) -> None:
    from perennial.cli.check import check_command

    keys = written(name, tmp_path) | {"stages": 1}
    path = experiment(keys, tmp_path)
    check_command(path, None)
    summary: Any = run_in_process(RunSettings(str(path), runs=str(tmp_path / "runs"), device="cpu"))
    assert summary["analytic"]["samples"] > 20 and summary["final_accuracy"] is not None
    # a frozen start has the same features, whatever the process
    assert built(keys).content == built(keys).content == summary["analytic"]["features"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_networks_go_through_export_and_onnx(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    from perennial.cli.export import export_command

    path = experiment(written(name, tmp_path), tmp_path)
    settings = RunSettings(str(path), runs=str(tmp_path / "runs"), device="cpu")
    run_in_process(settings)
    run, output = settings.folder(settings.load()), tmp_path / "exported"
    export_command(run, output, True)
    session = runtime.InferenceSession(output / "model.onnx", providers=["CPUExecutionProvider"])
    x = torch.randint(0, 256, (3, 3, 24, 40), dtype=torch.uint8)
    probabilities, _ = session.run(None, {"samples": x.numpy()})
    own = load_run(run).model.probabilities(x).numpy()
    assert np.abs(probabilities - own).max() < 1e-4
