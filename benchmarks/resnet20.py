"""ResNet-20 for images of 32 x 32 pixels, as a network that an experiment names by `module:Class`.

He et al. 2016 (arXiv 1512.03385), section 4.2: three stages of 16, 32 and 64 channels, three blocks each, and
shortcuts without parameters (their option A).
"""

import torch.nn.functional as F
from torch import Tensor, nn

from perennial.models.normalisation import group_norm

STAGES = (16, 32, 64)


class ResNet20(nn.Module):
    """(B, C, H, W) -> (B, 64). Group norms, which do not mix what sites with different classes see."""

    width = STAGES[-1]

    def __init__(self, input_shape: tuple[int, int, int], blocks: int = 3) -> None:
        """input_shape: (C, H, W). blocks: residual blocks of a stage."""
        super().__init__()
        channels = STAGES[0]
        self.stem = nn.Sequential(_convolution(input_shape[0], channels), group_norm(channels), nn.ReLU())
        stages: list[nn.Module] = []
        for width in STAGES:
            for place in range(blocks):
                stages.append(_Block(channels, width, 2 if place == 0 and width != STAGES[0] else 1))
                channels = width
        self.stages = nn.Sequential(*stages)

    def forward(self, x: Tensor) -> Tensor:
        return self.stages(self.stem(x)).mean(dim=(2, 3))


class _Block(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first, self.first_norm = _convolution(channels, width, stride), group_norm(width)
        self.second, self.second_norm = _convolution(width, width), group_norm(width)
        self.stride, self.more = stride, width - channels

    def forward(self, x: Tensor) -> Tensor:
        inner = self.second_norm(self.second(F.relu(self.first_norm(self.first(x)))))
        shortcut = x if self.stride == 1 else x[:, :, :: self.stride, :: self.stride]
        if self.more:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, 0, self.more))
        return F.relu(inner + shortcut)


def _convolution(channels: int, width: int, stride: int = 1) -> nn.Conv2d:
    layer = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer
