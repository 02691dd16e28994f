"""Builds the model that the `model` block of an experiment describes."""

import inspect
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from perennial.foundation import keywords, plugins
from perennial.foundation.errors import ConfigError
from perennial.foundation.streams import stream
from perennial.models.config import BACKBONES, CONVOLUTIONAL, ModelConfig
from perennial.models.digest_networks import DigestTwoBranchModel, FeatureEncoder, TwoBranchBackbone
from perennial.models.dual_backbone import DualBackboneModel
from perennial.models.feature_maps.config import PretrainedConfig
from perennial.models.feature_maps.fixed import build_fixed_features
from perennial.models.feature_maps.pixels import Constants
from perennial.models.feature_maps.pretrained import build_pretrained, has_tokens, pad_to_patches
from perennial.models.incremental import IncrementalModel
from perennial.models.layers import seed_initialisation
from perennial.models.networks import (
    SE_CNN_WIDTH,
    SECNN,
    MultilayerPerceptron,
    ResNet20,
    SmallCNN,
    build_mobilenet,
    build_resnet,
)


class PretrainedBackbone(nn.Module):
    """(B, C, H, W) normalised inputs -> (B, width) features. Grey images get three equal channels."""

    def __init__(
        self, network: nn.Module, size: tuple[int, int] | None, scale: Tensor, shift: Tensor
    ) -> None:
        """network: (B, 3, H, W) -> (B, width). size: to which images are resized; None keeps theirs.

        scale, shift: (3, 1, 1), convert this project's normalised inputs to the network's own.
        """
        super().__init__()
        self.network, self._size = network, size
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.shift = nn.Parameter(shift, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = (x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x) * self.scale + self.shift
        if self._size is not None and self._size != tuple(x.shape[2:]):
            x = F.interpolate(x, size=self._size, mode="bicubic", align_corners=False)
        return self.network(pad_to_patches(x, self.network))

    def train(self, mode: bool = True) -> "PretrainedBackbone":
        """Set training mode for all but batch normalisation, which keeps its statistics."""
        super().train(mode)
        for module in self.network.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
        return self


def build_pretrained_backbone(
    config: PretrainedConfig,
    input_shape: tuple[int, ...],
    constants: Constants | None,
    *,
    with_weights: bool = True,
) -> tuple[PretrainedBackbone, int]:
    """(the backbone, its number of features).

    constants: mean and std of the inputs; None with with_weights False, if a saved model brings all.
    Raises ConfigError if the weights are missing, or a key has no meaning here.
    """
    if len(input_shape) != 3:
        raise ConfigError(
            f"model.name: found 'pretrained', which reads images (channels, height, width), but the data has "
            f"shape {input_shape}; allowed for tables: mlp"
        )
    if config.stages:
        raise ConfigError(
            f"model.features.stages: found {config.stages}; allowed 0, and others with model features: "
            "what is trained here ends with the network's last layer"
        )
    if config.symmetry is not None:
        raise ConfigError(
            f"model.features.symmetry: found {config.symmetry!r}; allowed with model features alone: what is "
            "trained here sees each image as it is"
        )
    fixed, _ = build_pretrained(config, input_shape, with_weights)
    mean, std = (torch.zeros(1), torch.ones(1)) if constants is None else constants
    mean, std = mean.float().view(-1, 1, 1), std.float().view(-1, 1, 1)
    scale = (std / fixed.std).expand(3, 1, 1).clone()
    shift = ((mean - fixed.mean) / fixed.std).expand(3, 1, 1).clone()
    network = fixed.network
    width = int(network.num_features) if has_tokens(network) else fixed.width  # pyright: ignore
    network.requires_grad_(True)
    return PretrainedBackbone(network, fixed.size, scale.detach(), shift.detach()), width


SMALLEST_SIDE = 4


def build_model(
    config: ModelConfig,
    input_shape: tuple[int, ...],
    num_classes: int,
    seed: int,
    constants: Constants | None = None,
    *,
    with_weights: bool = True,
) -> IncrementalModel:
    """An untrained model on the CPU, initialised from the seed alone.

    input_shape: (C, H, W) of images or (D,) of tables, without the batch. num_classes: rows of the head, at
    least 1. constants: mean and std by which inputs are normalised, for feature maps that undo it.
    with_weights: False does not read weights trained elsewhere, for a model that a saved one's tensors will
    fill, which need no constants either.
    The same arguments give the same bits, whatever any global generator was used for before.
    Raises ConfigError naming the key when the network cannot read such inputs.
    """
    _check_input(config, input_shape)
    if num_classes < 1:
        raise ConfigError(f"model: found {num_classes} classes, allowed 1 or more")
    rows = stream(seed, "init", "head")
    if config.name == "features":
        fixed = build_fixed_features(
            config.features or (),
            input_shape,
            constants,
            projection=config.projection,
            with_weights=with_weights,
        )
        return IncrementalModel(fixed, fixed.width, num_classes, rows, dropout=config.dropout)
    if config.name == "pretrained":
        assert config.pretrained is not None
        learnt, width = build_pretrained_backbone(
            config.pretrained, input_shape, constants, with_weights=with_weights
        )
        return IncrementalModel(learnt, width, num_classes, rows, dropout=config.dropout)
    with seed_initialisation(seed, "backbone"):
        backbone, width = _build_backbone(config, input_shape)
        if config.name == "digest_two_branch":
            backbone = TwoBranchBackbone(backbone, width, input_shape)
    if isinstance(backbone, TwoBranchBackbone):
        encoder = FeatureEncoder(input_shape, seed)
        return DigestTwoBranchModel(backbone, encoder, num_classes, rows, dropout=config.dropout)
    if config.name == "dual_backbone":
        return DualBackboneModel(backbone, width, num_classes, rows, seed=seed, dropout=config.dropout)
    return IncrementalModel(backbone, width, num_classes, rows, dropout=config.dropout)


def _build_backbone(config: ModelConfig, input_shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    """The network (B, *input_shape) -> (B, d), and d."""
    name, norm = config.backbone_name, config.resolved_norm
    if name == "mlp":
        inputs = prod(input_shape)
        return MultilayerPerceptron(inputs, config.hidden, norm), (inputs, *config.hidden)[-1]
    if name not in BACKBONES:
        return _build_plugin(config, input_shape)
    colours, height, width = input_shape
    image_shape = (colours, height, width)
    attends = config.has_squeeze_excitation
    if name == "small_cnn":
        return SmallCNN(image_shape, config.channels, config.width, norm, attends), config.width
    if name == "se_cnn":
        return SECNN(image_shape, norm, attends), SE_CNN_WIDTH
    if name == "resnet20":
        return ResNet20(image_shape, norm, attends), ResNet20.width
    if name == "mobilenet_v2":
        return build_mobilenet(image_shape, norm, attends)
    return build_resnet(name, image_shape, norm, attends)


def _build_plugin(config: ModelConfig, input_shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    """Somebody else's network, and its attribute `width`. Raises ConfigError when it is none."""
    name = config.backbone_name
    network = plugins.load("model", name, "model.name")
    if not (inspect.isclass(network) and issubclass(network, nn.Module)):
        raise ConfigError(f"model.name: {name} is no network; allowed: a subclass of torch.nn.Module")
    module = keywords.build(network, name, config.options, "model.options", first=(input_shape,))
    width = getattr(module, "width", None)
    if not isinstance(width, int) or width < 1:
        raise ConfigError(
            f"model.name: {name} is no network for features; allowed: an nn.Module, made from the input "
            "shape, whose attribute `width` is the number of features of one sample"
        )
    return module, width


def _check_input(config: ModelConfig, input_shape: tuple[int, ...]) -> None:
    key = "model.backbone" if config.backbone else "model.name"
    name = config.backbone_name
    convolutional = name in CONVOLUTIONAL
    if convolutional and len(input_shape) != 3:
        raise ConfigError(
            f"{key}: found {name!r}, which reads images (channels, height, width), but the data has shape "
            f"{input_shape}; allowed for tables: mlp"
        )
    digests_of_images = config.name == "digest_two_branch" and len(input_shape) == 3
    if (convolutional or digests_of_images) and min(input_shape[1:]) < SMALLEST_SIDE:
        raise ConfigError(
            f"{key}: found {name!r} with images of {input_shape[1]}x{input_shape[2]} pixels; "
            f"allowed {SMALLEST_SIDE}x{SMALLEST_SIDE} or more, or the model mlp"
        )
