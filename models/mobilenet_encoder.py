"""MobileNetV2 up to its average pooling as an encoder of digests, and a fixed way from there to their shape.

Sandler et al. 2018 (arXiv 1801.04381), as in Hsu et al. 2022 (arXiv 2210.00737).
"""

from math import ceil
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perennial.foundation.errors import ConfigError
from perennial.foundation.streams import stream
from perennial.models.digest_encoders import FeatureEncoder, digest_shape
from perennial.models.initialisation import kaiming_uniform, seeded_initialisation
from perennial.models.torchvision_nets import mobilenet_v2

COLOURS = 3
SIDE, GRID = 64, 2
"""Images are brought to this side, at which the last maps have two by two indices."""
AT_ONCE = 128
"""Images; the first blocks' maps of one take 400 kB each."""
LINEAR_GAIN, SHORTCUT_GAIN = 0.5**0.5, 0.25
"""Of the last layer of a block, which no ReLU follows, and of one that is added to what it started from: so
that the size of random features neither grows nor vanishes over the blocks."""


class MobileNetEncoder(FeatureEncoder):
    """Images of 1 or 3 channels, grey shown as three equal colours; (B, 1280, 2, 2) maps -> digest.

    A random projection makes of each place's 1280 numbers those of a quarter of the digest. Everything is
    drawn from the seed; a file replaces the weights of `layers`, never the projection.
    """

    def __init__(self, input_shape: tuple[int, ...], seed: int) -> None:
        """Raises ConfigError for tables, and for images of other channels."""
        super().__init__(input_shape)
        if len(input_shape) != 3 or input_shape[0] not in (1, COLOURS):
            raise ConfigError(
                f"digests.encoder.name: found 'mobilenet_v2' with inputs of shape {tuple(input_shape)}; "
                f"allowed for images of 1 or {COLOURS} channels; random and autoencoder read others"
            )
        with seeded_initialisation(seed, "encoder"):
            network, width = mobilenet_v2((COLOURS, SIDE, SIDE), "batch", None)
        layers = network.features
        assert isinstance(layers, nn.Sequential)
        self.layers = layers
        rows, self.height, self.width = digest_shape(input_shape)
        self.factor = ceil(max(self.height, self.width) / GRID)
        self.projection = nn.Conv2d(width, rows * self.factor**2, 1, bias=False)
        generator = stream(seed, "init", "encoder")
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Conv2d):
                    module.weight.copy_(kaiming_uniform(tuple(module.weight.shape), 0.0, generator))
            for block in cast(Any, layers[1:-1]):
                block.conv[-1].weight.fill_(SHORTCUT_GAIN if block.use_res_connect else LINEAR_GAIN)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self._features(part) for part in x.split(AT_ONCE)])

    def _features(self, x: Tensor) -> Tensor:
        x = F.interpolate(x, size=(SIDE, SIDE), mode="bilinear", antialias=True)
        features = F.relu(self.projection(self.layers(x.expand(-1, COLOURS, -1, -1))))
        return F.pixel_shuffle(features, self.factor)[:, :, : self.height, : self.width]
