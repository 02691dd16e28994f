"""ResNet and MobileNetV2 of torchvision, fitted to small images, any number of colours and group norms.

He et al. 2016 (arXiv 1512.03385); Sandler et al. 2018 (arXiv 1801.04381).
"""

from collections import OrderedDict
from functools import cache
from typing import Any

from torch import Tensor, nn

from perennial.foundation.torchvision_import import torchvision
from perennial.models.config import FIRST_CHANNELS, Norm
from perennial.models.initialisation import begin_as_shortcut
from perennial.models.normalisation import group_norm
from perennial.models.se_cnn import SqueezeExcitation

SMALL_IMAGE = 64
"""Below this many pixels a side, reducing the image before the first block loses most of it."""

BLOCKS = {"resnet18": [2, 2, 2, 2], "resnet34": [3, 4, 6, 3]}
"""Residual blocks in each stage (He et al., table 1)."""


def resnet(name: str, input_shape: tuple[int, int, int], norm: Norm, attends: bool) -> tuple[nn.Module, int]:
    """ResNet without its classifier, and its feature width.

    name: resnet18 or resnet34. input_shape: (C, H, W). attends: with channel attention.
    Images below 64 pixels get a 3x3 first convolution of stride 1 and no pooling after it.
    """
    network = torchvision().models.ResNet(
        _residual_block(),
        BLOCKS[name],
        num_classes=1,
        norm_layer=_norm_layer(norm),
        zero_init_residual=True,  # initialisation.begin_as_shortcut says why
    )
    colours = input_shape[0]
    channels = FIRST_CHANNELS[name]
    if _is_small(input_shape):
        network.conv1 = nn.Conv2d(colours, channels, 3, padding=1, bias=False)
        network.maxpool = nn.Identity()
    else:
        network.conv1 = nn.Conv2d(colours, channels, 7, stride=2, padding=3, bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    if attends:
        network.bn1 = nn.Sequential(OrderedDict(norm=network.bn1, attention=SqueezeExcitation(channels)))
    features: int = network.fc.in_features
    network.fc = nn.Identity()
    _keep_inputs(network)
    return network, features


def mobilenet_v2(input_shape: tuple[int, int, int], norm: Norm, attends: bool) -> tuple[nn.Module, int]:
    """MobileNetV2 without its classifier, and its feature width.

    Images below 64 pixels get a first convolution of stride 1. Arguments as for resnet.
    """
    network = torchvision().models.mobilenet_v2(weights=None, num_classes=1, norm_layer=_norm_layer(norm))
    for block in network.features:
        if getattr(block, "use_res_connect", False):
            begin_as_shortcut(block.conv[-1])
    channels = FIRST_CHANNELS["mobilenet_v2"]
    stride = 1 if _is_small(input_shape) else 2
    first = nn.Conv2d(input_shape[0], channels, 3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(first.weight, mode="fan_out")
    _, stem_norm, activation = network.features[0]
    attention = [SqueezeExcitation(channels)] if attends else []
    network.features[0] = nn.Sequential(first, stem_norm, *attention, activation)
    features: int = network.last_channel
    network.classifier = nn.Identity()
    _keep_inputs(network)
    return network, features


@cache
def _residual_block() -> type[nn.Module]:
    """torchvision's block, whose sum overwrites no tensor: hooks for per-sample gradients forbid that."""

    class ResidualBlock(torchvision().models.resnet.BasicBlock):
        def forward(self, x: Tensor) -> Tensor:
            shortcut = x if self.downsample is None else self.downsample(x)
            inner = self.relu(self.bn1(self.conv1(x)))
            return self.relu(self.bn2(self.conv2(inner)) + shortcut)

    return ResidualBlock


def _norm_layer(norm: Norm) -> Any:
    return group_norm if norm == "group" else nn.BatchNorm2d


def _is_small(input_shape: tuple[int, int, int]) -> bool:
    return min(input_shape[1:]) < SMALL_IMAGE


def _keep_inputs(network: nn.Module) -> None:
    """In-place activations overwrite what hooks (per-sample gradients, sparsity) have recorded."""
    for module in network.modules():
        if isinstance(module, nn.ReLU | nn.ReLU6):
            module.inplace = False
