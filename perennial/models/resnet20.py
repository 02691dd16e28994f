"""ResNet-20 for images of about 32 x 32 pixels.

He et al. 2016 (arXiv 1512.03385), section 4.2: three stages of 16, 32 and 64 channels, three blocks each, and
shortcuts without parameters (their option A).
"""

import torch.nn.functional as F
from torch import Tensor, nn

from perennial.models.config import FIRST_CHANNELS, Norm
from perennial.models.initialisation import begin_as_shortcut
from perennial.models.normalisation import optional_norm
from perennial.models.se_cnn import SqueezeExcitation

STAGES = (FIRST_CHANNELS["resnet20"], 32, 64)
BLOCKS = 3
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
            _convolution(input_shape[0], channels), _norm(norm, channels), *attention, nn.ReLU()
        )
        stages: list[nn.Module] = []
        for width in STAGES:
            for place in range(BLOCKS):
                stages.append(_Block(channels, width, 2 if place == 0 and width != STAGES[0] else 1, norm))
                channels = width
        self.stages = nn.Sequential(*stages)

    def forward(self, x: Tensor) -> Tensor:
        return self.stages(self.stem(x)).mean(dim=(2, 3))


class _Block(nn.Module):
    def __init__(self, channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.first, self.first_norm = _convolution(channels, width, stride), _norm(norm, width)
        self.second, self.second_norm = _convolution(width, width), _norm(norm, width)
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


def _convolution(channels: int, width: int, stride: int = 1) -> nn.Conv2d:
    layer = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def _norm(norm: Norm, channels: int) -> nn.Module:
    layer = optional_norm(norm, channels)
    assert layer is not None  # a residual network without one is refused when its experiment is read
    return layer
