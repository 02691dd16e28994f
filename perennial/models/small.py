"""The two small reference networks: for tables, and for images down to 4x4 pixels.

Shapes: x (B, ...) float32 input, output (B, d) features.
"""

from math import ceil

from torch import Tensor, nn
from torch.nn import functional as F

from perennial.models.config import Norm
from perennial.models.normalisation import optional_norm
from perennial.models.se_cnn import SqueezeExcitation

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
            layer_norm = optional_norm(norm, after, nn.BatchNorm1d)
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
        self.norm1 = optional_norm(norm, first)
        self.attention = SqueezeExcitation(first) if attends else None
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(first, second, 3, padding=1)
        self.norm2 = optional_norm(norm, second)
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
