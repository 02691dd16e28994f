"""Every network reads every input that it should, from the same seed with the same bits."""

import pytest
import torch
from pydantic import ValidationError

from perennial.foundation.errors import ConfigError
from perennial.models.config import ModelConfig
from perennial.models.factory import build_model
from perennial.models.incremental import complete_state

SHAPES = [(1, 8, 8), (3, 32, 32), (1, 28, 28), (40,), (3, 64, 64)]
SMALL = [
    ModelConfig(name="mlp"),
    ModelConfig(name="mlp", hidden=(16, 8), norm="batch", dropout=0.5),
    ModelConfig(name="small_cnn"),
    ModelConfig(name="small_cnn", norm="group", squeeze_excitation=True),
    ModelConfig(name="dual_backbone", backbone="small_cnn"),
    ModelConfig(name="dual_backbone", backbone="mlp"),
    ModelConfig(name="digest_two_branch", backbone="small_cnn"),
    ModelConfig(name="digest_two_branch", backbone="mlp"),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("config", SMALL, ids=lambda config: f"{config.name}-{config.backbone_name}")
def test_features_and_logits_have_the_announced_shapes(config, shape):
    if len(shape) == 1 and config.backbone_name != "mlp":
        with pytest.raises(ConfigError, match=r"model\.(name|backbone).*small_cnn.*mlp"):
            build_model(config, shape, 3, seed=1)
        return
    model = build_model(config, shape, 3, seed=1).eval()
    x = torch.rand(2, *shape)
    features = model.features(x)
    assert features.shape == (2, model.feature_width)
    assert model.num_classes == 3
    torch.testing.assert_close(model(x), model.classify(features), rtol=0, atol=0)
    assert model(x).shape == (2, 3)


def test_resnet_computes_what_torchvisions_does():
    from perennial.foundation.torchvision_import import import_torchvision

    ours = build_model(ModelConfig(name="resnet18", norm="batch"), (3, 64, 64), 5, seed=1)
    theirs = import_torchvision().models.resnet18(weights=None, num_classes=5)
    ours_state = ours.state_dict()
    theirs.load_state_dict(
        {
            key: ours_state[key.replace("fc.", "head.") if "fc." in key else f"backbone.{key}"]
            for key in theirs.state_dict()
        }
    )
    x = torch.rand(3, 3, 64, 64)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


@pytest.mark.parametrize(
    "config",
    [*SMALL, ModelConfig(name="mobilenet_v2"), ModelConfig(name="resnet20")],
    ids=lambda config: f"{config.name}-{config.backbone_name}",
)
def test_the_seed_alone_decides_the_first_values(config):
    shape = (1, 8, 8)
    torch.rand(1)
    before = torch.random.get_rng_state()
    one = complete_state(build_model(config, shape, 3, seed=7))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(17)
    two = complete_state(build_model(config, shape, 3, seed=7))
    other = complete_state(build_model(config, shape, 3, seed=8))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])
    first = next(key for key in one if key.startswith("backbone.") and one[key].dim() > 1)
    assert not torch.equal(one[first], other[first])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "small_cnn", "hidden": [32]}, ["'hidden'", "small_cnn", "mlp"]),
        ({"name": "mlp", "width": 32}, ["'width'", "mlp", "small_cnn"]),
        ({"name": "dual_backbone", "backbone": "resnet18", "channels": [8, 8]}, ["'channels'", "resnet18"]),
        ({"name": "mlp", "squeeze_excitation": True}, ["'squeeze_excitation'", "mlp", "resnet18"]),
        ({"name": "small_cnn", "channels": [1, 8], "squeeze_excitation": True}, ["'channels'", "2 or more"]),
        ({"name": "resnet18", "norm": "none"}, ["'norm'", "resnet18", "group, batch"]),
        ({"name": "dual_backbone"}, ["'backbone'", "dual_backbone", "small_cnn"]),
        ({"name": "mlp", "backbone": "small_cnn"}, ["'backbone'", "mlp", "dual_backbone"]),
        ({"name": "dual_backbone", "backbone": "dual_backbone"}, ["backbone", "small_cnn"]),
        ({"name": "mlp", "hidden": [0]}, ["hidden"]),
        ({"name": "mlp", "dropout": 1.0}, ["dropout"]),
        ({"name": "mlp", "depth": 3}, ["depth"]),
    ],
)
def test_an_option_that_the_network_does_not_take_is_named(settings, words):
    with pytest.raises(ValidationError) as error:
        ModelConfig.model_validate(settings)
    for word in words:
        assert word in str(error.value)
