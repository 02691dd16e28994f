"""Sparsity vectors of a VGG-11: the same at every site, read from a file, refused where it does not fit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from perennial.foundation.errors import ConfigError
from perennial.foundation.torchvision_import import torchvision
from perennial.models.sparsity import common_channels, zero_shares
from perennial.models.vgg_front import read_vgg11, vgg11_front, with_weights
from perennial.protocol.fields import read_kind
from perennial.strategies.clusters.site_vectors import VectorSettings
from tests.personal_runs import run


def test_its_first_layers_are_those_of_vgg11_and_repeat_with_the_seed() -> None:
    front = vgg11_front(3, (1, 8, 8), seed=1)
    x = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert [len(layer) for layer in zero_shares(front, [x], 3)] == [64, 128, 256]
    assert common_channels(front, x[:1], 3, "average") == 64
    again, other = vgg11_front(3, (1, 8, 8), seed=1), vgg11_front(3, (1, 8, 8), seed=2)
    assert torch.equal(front(x), again(x))
    assert not torch.equal(front(x), other(x))
    assert torch.equal(front(x), front(x.repeat(1, 3, 1, 1)))


def test_weights_of_torchvision_are_read_by_its_names(tmp_path: Path) -> None:
    vgg = torchvision().models.vgg
    features = vgg.make_layers(vgg.cfgs["A"], batch_norm=False).eval()
    tensors = {f"features.{name}": tensor for name, tensor in features.state_dict().items()}
    save_file(tensors | {"classifier.0.bias": torch.zeros(2)}, tmp_path / "vgg11.safetensors")
    front = with_weights(vgg11_front(2, (3, 8, 8), seed=1), read_vgg11(tmp_path / "vgg11.safetensors"))
    x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(front(x), features[:5](x))
    save_file({"features.0.weight": torch.zeros(64, 3, 5, 5)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match=r"layers\.0\.weight: found \(64, 3, 5, 5\), expected"):
        with_weights(vgg11_front(1, (3, 8, 8), seed=1), read_vgg11(tmp_path / "other.safetensors"))
    with pytest.raises(ConfigError, match="strategy.extractor: .*missing"):
        read_vgg11(tmp_path / "missing.safetensors")


def test_what_it_cannot_look_at_is_refused() -> None:
    with pytest.raises(ConfigError, match="layers: found 9; VGG-11 allows 1 to 8"):
        vgg11_front(9, (3, 32, 32), seed=1)
    for shape in ((16,), (2, 8, 8), (1, 2, 8)):
        with pytest.raises(ConfigError, match="extractor: found inputs of shape"):
            vgg11_front(3, shape, seed=1)
    for extractor in ("vgg16:random", "vgg11", "vgg11:", "globl"):
        with pytest.raises(ValueError, match="allowed global, vgg11:random or vgg11:FILE"):
            VectorSettings(1, 1, "average", False, None, 1e-5, extractor)


def test_a_run_groups_sites_by_it_and_sends_no_model_for_that(tmp_path: Path) -> None:
    done = run(tmp_path, strategy={"extractor": "vgg11:random", "channels": 16, "layers": 3})
    assert set(done.summary["personalisation"]["members"].values()) == {0, 1}
    asked = [m.content for m in done.asked if read_kind(m.content) == "SparsityRequest"]
    assert len(asked) == 4
    names = {f"layers.{place}.{kind}" for place in (0, 3, 6) for kind in ("weight", "bias")}
    assert all(set(content.array_records["arrays"]) == names for content in asked)
