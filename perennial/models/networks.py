"""The built-in networks: an MLP, two small CNNs, residual networks and MobileNetV2, and the norms in them.

SmallCNN and the MLP are the reference networks, for images down to 4x4 pixels and for tables. SECNN is
Incre-FL's (Hu et al. 2022, Appl. Sci. 12(19):10025). ResNet-20 is that of He et al. 2016 (arXiv 1512.03385),
section 4.2: three stages of three blocks, and shortcuts without parameters (option A). ResNet-18, ResNet-34
and MobileNetV2 (Sandler et al. 2018, arXiv 1801.04381) are torchvision's, fitted to small images.

Shapes: x (B, ...) float32 input, output (B, d) features.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from math import ceil, gcd
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from perennial.foundation.torchvision_import import import_torchvision
from perennial.models.config import FIRST_CHANNELS, Norm
from perennial.models.layers import begin_as_shortcut


def group_norm(channels: int) -> nn.GroupNorm:
    """Group normalisation of eight groups, or of the greatest common divisor of eight and channels.

    It holds no statistics of the data and sees one sample at a time, which suits sites with different
    classes and per-sample privacy.

    Wu and He 2018 (arXiv 1803.08494).
    """
    return nn.GroupNorm(gcd(8, channels), channels)


def build_optional_norm(
    norm: Norm, channels: int, batch_norm: Callable[[int], nn.Module] = nn.BatchNorm2d
) -> nn.Module | None:
    """The layer for (B, channels, ...), or None for "none". batch_norm: BatchNorm1d for vectors."""
    if norm == "group":
        return group_norm(channels)
    return batch_norm(channels) if norm == "batch" else None


SE_CNN_WIDTH = 512


class SqueezeExcitation(nn.Module):
    """Scales each channel by a factor in (0, 1) computed from the means of all channels.

    u_BCHW -> u_BCHW * e_BC with e = sigmoid(W_b relu(W_a mean_HW(u) + a) + b); hidden width channels // 2.

    Hu et al. 2018 (arXiv 1709.01507).
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(channels, channels // 2)
        self.excite = nn.Linear(channels // 2, channels)

    def forward(self, u: Tensor) -> Tensor:
        means = u.mean((2, 3))
        scale = self.excite(F.relu(self.squeeze(means))).sigmoid()
        return u * scale[:, :, None, None]


class SECNN(nn.Module):
    """1x1 convolution, channel attention, two 3x3 convolutions with pooling, two linear layers; d = 512.

    The paper gives the first convolution, the attention (16 to 8 channels, reduction 2) and the 512
    features; the widths between them are ours. No non-linearity but the attention
    follows the first convolution.
    """

    def __init__(self, input_shape: tuple[int, int, int], norm: Norm, attends: bool) -> None:
        """input_shape: (C, H, W), H and W at least 4. attends: with channel attention."""
        super().__init__()
        colours, height, width = input_shape
        self.conv1 = nn.Conv2d(colours, 16, 1)
        self.norm1 = build_optional_norm(norm, 16)
        self.attention = SqueezeExcitation(16) if attends else None
        self.conv2 = nn.Conv2d(16, 64, 3, padding=1)
        self.norm2 = build_optional_norm(norm, 64)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(64, 128, 3, padding=1)
        self.norm3 = build_optional_norm(norm, 128)
        self.relu3 = nn.ReLU()
        self.fc3 = nn.Linear(128 * (height // 4) * (width // 4), 512)
        self.relu4 = nn.ReLU()
        self.fc4 = nn.Linear(512, SE_CNN_WIDTH)
        self.relu5 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        if self.norm1 is not None:
            x = self.norm1(x)
        x = self.conv2(x if self.attention is None else self.attention(x))
        if self.norm2 is not None:
            x = self.norm2(x)
        x = self.conv3(F.max_pool2d(self.relu2(x), 2))
        if self.norm3 is not None:
            x = self.norm3(x)
        x = F.max_pool2d(self.relu3(x), 2)
        return self.relu5(self.fc4(self.relu4(self.fc3(x.flatten(1)))))


LARGEST_MAP = 8
"""The longer side of the map that reaches the linear layer is below twice this: larger maps, of images of
64 pixels and more, are averaged down. At 128 x 96 pixels that layer would have 1.6 million weights, too many
for a clinic's images to teach."""


class MultilayerPerceptron(nn.Module):
    """Linear layers with ReLU; images are flattened. d is the last of hidden, or else of the inputs."""

    def __init__(self, inputs: int, hidden: tuple[int, ...], norm: Norm) -> None:
        super().__init__()
        widths = (inputs, *hidden)
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in zip(widths, hidden, strict=False):
            layer_norm = build_optional_norm(norm, after, nn.BatchNorm1d)
            layers += [nn.Linear(before, after), *([layer_norm] if layer_norm else []), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class SmallCNN(nn.Module):
    """Two 3x3 convolutions, each with ReLU and 2x2 max-pooling, and one fully connected layer with ReLU.

    Before that layer the map of a large image is averaged down (LARGEST_MAP).
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        channels: tuple[int, int],
        width: int,
        norm: Norm,
        attends: bool,
    ) -> None:
        """input_shape: (C, H, W), H and W at least 4. attends: with channel attention."""
        super().__init__()
        colours, height, rows_width = input_shape
        first, second = channels
        self.conv1 = nn.Conv2d(colours, first, 3, padding=1)
        self.norm1 = build_optional_norm(norm, first)
        self.attention = SqueezeExcitation(first) if attends else None
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(first, second, 3, padding=1)
        self.norm2 = build_optional_norm(norm, second)
        self.relu2 = nn.ReLU()
        sides = height // 4, rows_width // 4
        cells = max(1, max(sides) // LARGEST_MAP)
        self.pool = min(cells, sides[0]), min(cells, sides[1])
        self.fc = nn.Linear(second * ceil(sides[0] / self.pool[0]) * ceil(sides[1] / self.pool[1]), width)
        self.relu3 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        if self.norm1 is not None:
            x = self.norm1(x)
        if self.attention is not None:
            x = self.attention(x)
        x = F.max_pool2d(self.relu1(x), 2)
        x = self.conv2(x)
        if self.norm2 is not None:
            x = self.norm2(x)
        x = F.max_pool2d(self.relu2(x), 2)
        if max(self.pool) > 1:
            x = F.avg_pool2d(x, self.pool, ceil_mode=True)
        return self.relu3(self.fc(x.flatten(1)))


STAGES = (FIRST_CHANNELS["resnet20"], 32, 64)
BLOCKS_A_STAGE = 3
"""Of one stage."""


class ResNet20(nn.Module):
    """(B, C, H, W) -> (B, 64), the mean over all places."""

    width = STAGES[-1]

    def __init__(self, input_shape: tuple[int, int, int], norm: Norm, attends: bool) -> None:
        """Draw all weights from the global generator.

        Args:
            input_shape: (C, H, W).
            norm: group or batch. Group norms do not mix what sites with different classes see.
            attends: with channel attention after the first convolution.
        """
        super().__init__()
        channels = STAGES[0]
        attention = [SqueezeExcitation(channels)] if attends else []
        self.stem = nn.Sequential(
            _build_convolution(input_shape[0], channels), _build_norm(norm, channels), *attention, nn.ReLU()
        )
        stages: list[nn.Module] = []
        for width in STAGES:
            for place in range(BLOCKS_A_STAGE):
                stages.append(
                    _PlainBlock(channels, width, 2 if place == 0 and width != STAGES[0] else 1, norm)
                )
                channels = width
        self.stages = nn.Sequential(*stages)

    def forward(self, x: Tensor) -> Tensor:
        return self.stages(self.stem(x)).mean(dim=(2, 3))


class _PlainBlock(nn.Module):
    def __init__(self, channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.first, self.first_norm = _build_convolution(channels, width, stride), _build_norm(norm, width)
        self.second, self.second_norm = _build_convolution(width, width), _build_norm(norm, width)
        self.shortcut = nn.Identity() if stride == 1 else _Shortcut(stride, width - channels)
        begin_as_shortcut(self.second_norm)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.second_norm(self.second(F.relu(self.first_norm(self.first(x)))))
        return F.relu(inner + self.shortcut(x))


class _Shortcut(nn.Module):
    """Every `stride`-th place, and `more` channels of zeros.

    It is a module so that sites which train in one pass (stacked.py) each get channels of zeros of their own.
    """

    def __init__(self, stride: int, more: int) -> None:
        super().__init__()
        self.stride, self.more = stride, more

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))


def _build_convolution(channels: int, width: int, stride: int = 1) -> nn.Conv2d:
    layer = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def _build_norm(norm: Norm, channels: int) -> nn.Module:
    layer = build_optional_norm(norm, channels)
    assert layer is not None  # a residual network without one is refused when its experiment is read
    return layer


SMALL_IMAGE = 64
"""Below this many pixels a side, reducing the image before the first block loses most of it."""

BLOCKS = {"resnet18": [2, 2, 2, 2], "resnet34": [3, 4, 6, 3]}
"""Residual blocks in each stage (He et al., table 1)."""


def build_resnet(
    name: str, input_shape: tuple[int, int, int], norm: Norm, attends: bool
) -> tuple[nn.Module, int]:
    """ResNet without its classifier, and its feature width.

    name: resnet18 or resnet34. input_shape: (C, H, W). attends: with channel attention.
    Images below 64 pixels get a 3x3 first convolution of stride 1 and no pooling after it.
    """
    network = import_torchvision().models.ResNet(
        _build_residual_block(),
        BLOCKS[name],
        num_classes=1,
        norm_layer=_choose_norm_layer(norm),
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


def build_mobilenet(input_shape: tuple[int, int, int], norm: Norm, attends: bool) -> tuple[nn.Module, int]:
    """MobileNetV2 without its classifier, and its feature width.

    Images below 64 pixels get a first convolution of stride 1. Arguments as for resnet.
    """
    network = import_torchvision().models.mobilenet_v2(
        weights=None, num_classes=1, norm_layer=_choose_norm_layer(norm)
    )
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
def _build_residual_block() -> type[nn.Module]:
    """torchvision's block, whose sum overwrites no tensor: hooks for per-sample gradients forbid that."""

    class ResidualBlock(import_torchvision().models.resnet.BasicBlock):
        def forward(self, x: Tensor) -> Tensor:
            shortcut = x if self.downsample is None else self.downsample(x)
            inner = self.relu(self.bn1(self.conv1(x)))
            return self.relu(self.bn2(self.conv2(inner)) + shortcut)

    return ResidualBlock


def _choose_norm_layer(norm: Norm) -> Any:
    return group_norm if norm == "group" else nn.BatchNorm2d


def _is_small(input_shape: tuple[int, int, int]) -> bool:
    return min(input_shape[1:]) < SMALL_IMAGE


def _keep_inputs(network: nn.Module) -> None:
    """In-place activations overwrite what hooks (per-sample gradients, sparsity) have recorded."""
    for module in network.modules():
        if isinstance(module, nn.ReLU | nn.ReLU6):
            module.inplace = False
