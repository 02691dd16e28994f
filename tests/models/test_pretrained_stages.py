"""Stages of a pretrained network beside its last layer, and batch normalisation folded into convolutions."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from perennial.foundation.errors import ConfigError
from perennial.models.factory import build_pretrained_backbone
from perennial.models.feature_maps.config import PretrainedConfig
from perennial.models.feature_maps.fixed import build_fixed_features
from perennial.models.feature_maps.pretrained import build_pretrained, fold, list_stages
from tests.models.test_pretrained_backbone import weights  # noqa: F401  a fixture

pytestmark = pytest.mark.skipif(find_spec("timm") is None, reason="needs timm (perennial-fl[pretrained])")


def network(name: str) -> nn.Module:
    """timm's network with drawn weights and statistics that it could have learnt."""
    from perennial.models.feature_maps.weights import build_bare_network

    found, generator = build_bare_network(name), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in found.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None and module.running_var is not None
                for values, least in ((module.weight, 0.8), (module.running_var, 0.5)):
                    values.copy_(least + torch.rand(values.shape, generator=generator))
                for values in (module.bias, module.running_mean):
                    values.copy_(torch.randn(values.shape, generator=generator) / 5)
    return found


@pytest.mark.parametrize(("name", "left"), [("tf_efficientnet_lite0", 0), ("resnet10t", 1)])
def test_a_folded_network_computes_the_same_with_less_normalisation(name: str, left: int) -> None:
    """One of resnet10t's reads what a sequence of layers gives, and stays."""
    found = network(name).double()
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(2)).double()
    with torch.no_grad():
        expected = found(images)
        fold(found)
        assert torch.allclose(found(images), expected, rtol=1e-9, atol=1e-9)
    assert sum(isinstance(module, nn.BatchNorm2d) for module in found.modules()) == left


def test_stages_stand_beside_the_last_layer_each_of_length_1(weights: dict[str, Any]) -> None:  # noqa: F811
    config = PretrainedConfig.model_validate(weights | {"stages": 2})
    module, _ = build_pretrained(config, (3, 32, 32), True)
    pixels = (torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(3)) * 255).round()
    seen: list[torch.Tensor] = []
    stages = list_stages(module.network)
    assert len(stages) == 4
    for stage in stages[2:]:
        stage.register_forward_hook(lambda *call: seen.append(call[-1]))
    with torch.no_grad():
        found = module(pixels)
        last = module.network((pixels / 255 - module.mean) / module.std)
    widths = [last.shape[1], *(maps.shape[1] for maps in seen[:2])]
    assert module.width == found.shape[1] == sum(widths)
    parts = found.split(widths, dim=1)
    for part, expected in zip(parts, [last, *(maps.mean(dim=(2, 3)) for maps in seen[:2])], strict=True):
        assert torch.allclose(part, nn.functional.normalize(expected, dim=1), atol=1e-6)

    alone, _ = build_pretrained(PretrainedConfig.model_validate(weights), (3, 32, 32), True)
    assert alone.width == last.shape[1]
    assert module.about == f"{alone.about} 2 stages"
    maps = [build_fixed_features([c], (3, 32, 32), None) for c in (config, config)]
    assert maps[0].content == maps[1].content
    assert (
        maps[0].content
        != build_fixed_features([PretrainedConfig.model_validate(weights)], (3, 32, 32), None).content
    )


def test_what_stages_do_not_go_with_is_named(weights: dict[str, Any], tmp_path: Path) -> None:  # noqa: F811
    config = PretrainedConfig.model_validate(weights | {"stages": 5})
    with pytest.raises(ConfigError, match="found stages 5; resnet10t has 4: allowed 0 to 4"):
        build_pretrained(config, (3, 32, 32), True)
    constants = torch.tensor([0.4]), torch.tensor([0.3])
    with pytest.raises(ConfigError, match=r"model\.features\.stages: found 5; allowed 0"):
        build_pretrained_backbone(config, (3, 32, 32), constants)
