"""Every network reads every input that it should, from the same seed with the same bits."""

import pytest
import torch
from torch import nn

from perennial.foundation.errors import ConfigError
from perennial.models.config import ModelConfig
from perennial.models.factory import build_model
from perennial.models.incremental import complete_state
from perennial.models.se_cnn import SqueezeExcitation

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


def side(length: int, kernel: int, padding: int, stride: int) -> int:
    """Output side of a convolution or pooling (Hu et al. 2022, equation 6)."""
    return (length - kernel + 2 * padding) // stride + 1


@pytest.mark.parametrize(("height", "width"), [(32, 32), (5, 9), (7, 4)])
def test_se_cnn_has_the_sizes_of_the_papers_formula(height, width):
    assert [side(32, 1, 0, 1), side(32, 3, 0, 1), side(5, 2, 0, 2)] == [32, 30, 2]
    network = build_model(ModelConfig(name="se_cnn"), (3, height, width), 2, seed=1).backbone
    found = {}
    for name in ("conv1", "attention", "conv2", "conv3"):
        module = network.get_submodule(name)
        module.register_forward_hook(lambda _, __, out, name=name: found.update({name: tuple(out.shape)}))
    network(torch.rand(2, 3, height, width))
    # 1x1 without padding, 3x3 with padding 1, and halving between them that rounds down
    first = tuple(side(length, 1, 0, 1) for length in (height, width))
    second = tuple(side(length, 3, 1, 1) for length in first)
    third = tuple(side(side(length, 2, 0, 2), 3, 1, 1) for length in second)
    pooled = [side(length, 2, 0, 2) for length in third]
    assert found == {
        "conv1": (2, 16, *first),
        "attention": (2, 16, *first),
        "conv2": (2, 64, *second),
        "conv3": (2, 128, *third),
    }
    assert network.fc3.in_features == 128 * pooled[0] * pooled[1]


@pytest.mark.parametrize(
    ("name", "shape", "width"),
    [
        ("resnet18", (1, 8, 8), 512),
        ("resnet18", (4, 64, 64), 512),
        ("resnet34", (3, 32, 32), 512),
        ("resnet20", (3, 32, 32), 64),
        ("mobilenet_v2", (1, 28, 28), 1280),
    ],
)
def test_residual_networks_lose_their_classifier_and_batch_norms(name, shape, width):
    model = build_model(ModelConfig(name=name, squeeze_excitation=True), shape, 3, seed=1).eval()
    assert model.features(torch.rand(2, *shape)).shape == (2, width)
    kinds = {type(module) for module in model.modules()}
    assert nn.GroupNorm in kinds and SqueezeExcitation in kinds
    assert not kinds & {nn.BatchNorm2d, nn.BatchNorm1d}
    assert not any(getattr(module, "inplace", False) for module in model.modules())
    linears = [module for module in model.backbone.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == 2, "only the attention's; the classifier must be gone"


def test_resnet20_has_the_papers_parameters_and_reads_one_sample_at_a_time():
    network = build_model(ModelConfig(name="resnet20"), (3, 32, 32), 10, seed=1).eval()
    assert sum(each.numel() for each in network.parameters()) == pytest.approx(0.27e6, rel=0.01)  # table 6
    images = torch.randn(4, 3, 32, 32)
    alone = torch.cat([network(image[None]) for image in images])
    torch.testing.assert_close(network(images), alone, rtol=1e-4, atol=1e-4)


def test_resnet_computes_what_torchvisions_does():
    from perennial.foundation.torchvision_import import torchvision

    ours = build_model(ModelConfig(name="resnet18", norm="batch"), (3, 64, 64), 5, seed=1)
    theirs = torchvision().models.resnet18(weights=None, num_classes=5)
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
