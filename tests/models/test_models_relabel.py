"""Renamed neurons compute the same, and can be renamed back to the bit."""

import pytest
import torch
from torch import nn

from perennial.foundation.errors import ConfigError
from perennial.foundation.streams import stream
from perennial.models.config import ModelConfig
from perennial.models.factory import build_model
from perennial.models.incremental import complete_state
from perennial.models.relabel import _apply, _list_hidden_layers, relabel

CASES = [
    ({"name": "mlp", "hidden": [24, 16]}, (1, 8, 8)),
    ({"name": "mlp", "hidden": [24, 16], "norm": "batch"}, (10,)),
    ({"name": "mlp", "hidden": [24, 16], "norm": "group"}, (10,)),
    ({"name": "small_cnn"}, (1, 8, 8)),
    ({"name": "small_cnn"}, (1, 72, 64)),
    ({"name": "small_cnn", "norm": "group", "squeeze_excitation": True}, (2, 12, 8)),
    ({"name": "small_cnn", "norm": "batch", "channels": [12, 20]}, (1, 8, 8)),
    ({"name": "se_cnn"}, (3, 8, 8)),
    ({"name": "se_cnn", "squeeze_excitation": False}, (3, 8, 8)),
    ({"name": "se_cnn", "norm": "group"}, (1, 8, 8)),
    ({"name": "resnet18"}, (3, 16, 16)),
    ({"name": "resnet18", "norm": "batch", "squeeze_excitation": True}, (1, 16, 16)),
]


def _model(settings, shape):
    """A model in which no two neurons are alike: affine parameters and statistics are drawn too."""
    model = build_model(ModelConfig.model_validate(settings), shape, 3, seed=1).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.GroupNorm | nn.BatchNorm1d | nn.BatchNorm2d):
                for tensor in (
                    module.weight,
                    module.bias,
                    *(b for b in module.buffers() if b.is_floating_point()),
                ):
                    tensor.uniform_(0.5, 1.5, generator=generator)
        model.head.bias.uniform_(-1, 1, generator=generator)
    return model


def _undo(model, permutations):
    inverse = {name: permutation.argsort() for name, permutation in permutations.items()}
    _apply(model, _list_hidden_layers(model), inverse)


@pytest.mark.parametrize(("settings", "shape"), CASES, ids=str)
def test_the_function_stays_and_the_inverse_restores_every_bit(settings, shape):
    model = _model(settings, shape)
    before = {key: tensor.clone() for key, tensor in complete_state(model).items()}
    x = torch.rand(4, *shape, generator=torch.Generator().manual_seed(3))
    expected = model(x)
    permutations = relabel(model, stream(1, "relabel", 1))
    renamed = complete_state(model)
    # residual networks reach logits of several units, in which 1e-5 is the rounding of a handful of sums
    assert (model(x) - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max().detach()))
    unchanged = {key for key, tensor in before.items() if torch.equal(tensor, renamed[key])}
    assert unchanged == {"head.bias"}, "every other tensor has a hidden axis"
    assert all(sorted(p.tolist()) == list(range(len(p))) for p in permutations.values())
    _undo(model, permutations)
    assert all(torch.equal(before[key], tensor) for key, tensor in complete_state(model).items())


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "mobilenet_v2"},
        {"name": "resnet20"},
        {"name": "dual_backbone", "backbone": "small_cnn"},
        {"name": "digest_two_branch", "backbone": "small_cnn"},
    ],
)
def test_a_network_without_known_labelling_is_refused(settings):
    model = build_model(ModelConfig.model_validate(settings), (1, 8, 8), 3, seed=1)
    with pytest.raises(ConfigError, match="allowed the models mlp, small_cnn"):
        relabel(model, stream(1, "relabel", 1))
