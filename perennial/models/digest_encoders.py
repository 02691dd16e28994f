"""FedDig's feature encoders P_R: networks that the federation never trains, the same at sites and server.

A random one holds nothing of anybody's data; a trained one holds something of what it was trained on.

Shapes: x (B, *input_shape); r (B, *digest_shape), never below 0; digest_shape is (4, h, w) for images and
(64,) for tables.
"""

import hashlib
from math import ceil
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perennial.foundation.errors import ConfigError, StateError
from perennial.foundation.streams import stream
from perennial.models.config import EncoderConfig
from perennial.models.encoder_file import KEY, read_autoencoder, read_torchvision
from perennial.models.incremental import copy_state
from perennial.models.initialisation import kaiming_uniform, seeded_initialisation
from perennial.models.torchvision_nets import mobilenet_v2

CANVAS = 32
"""Images above 16 pixels are brought to this side, so that a digest always has 256 numbers."""
SMALL_SIDE = 16
TABLE_DIGEST = 64
COLOURS = 3
MOBILE_SIDE, MOBILE_GRID = 64, 2
"""Images of MobileNetV2 are brought to this side, at which the last maps have two by two indices."""
AT_ONCE = 128
"""Images; the first blocks' maps of one take 400 kB each."""
LINEAR_GAIN, SHORTCUT_GAIN = 0.5**0.5, 0.25
"""Of the last layer of a block, which no ReLU follows, and of one that is added to what it started from: so
that the size of random features neither grows nor vanishes over the blocks."""


def digest_shape(input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of one sample's encoded features, by the shape of the sample.

    Images (C, H, W) with a side above 16 pixels: (4, 8, 8); smaller ones: (4, H / 2, W / 2), rounded up. Rows
    of a table (D,): (64,).
    """
    if len(input_shape) == 1:
        return (TABLE_DIGEST,)
    height, width = input_shape[1:]
    if max(height, width) > SMALL_SIDE:
        return (4, CANVAS // 4, CANVAS // 4)
    return (4, (height + 1) // 2, (width + 1) // 2)


class FeatureEncoder(nn.Module):
    """x -> r >= 0, for each sample by itself. layers: the part whose weights a file holds."""

    layers: nn.Sequential

    def __init__(self, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.input_shape = input_shape

    def train(self, mode: bool = True) -> "FeatureEncoder":
        """Stay in evaluation mode, whatever the model around it does: its statistics are fixed too."""
        return super().train(False)


class ConvolutionalEncoder(FeatureEncoder):
    """Two layers, random and fixed by the seed: the same bits everywhere. input_shape: (C, H, W) or (D,)."""

    def __init__(self, input_shape: tuple[int, ...], seed: int) -> None:
        super().__init__(input_shape)
        with seeded_initialisation(seed, "encoder"):
            self.layers = _layers(input_shape)
        # PyTorch's normal and uniform draws may differ in the last bit between processors; the hash would too
        generator = stream(seed, "init", "encoder")
        with torch.no_grad():
            for name, parameter in self.layers.named_parameters():
                if name.endswith("weight"):
                    parameter.copy_(kaiming_uniform(tuple(parameter.shape), 0.0, generator))
                else:
                    parameter.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(_to_canvas(x) if x.dim() == 4 else x)


class MobileNetEncoder(FeatureEncoder):
    """MobileNetV2 up to its average pooling: images of 1 or 3 channels -> (B, 1280, 2, 2) maps -> digest.

    Sandler et al. 2018 (arXiv 1801.04381), as in Hsu et al. 2022 (arXiv 2210.00737). Grey is shown as three
    equal colours. A random projection makes of each place's 1280 numbers those of a quarter of the digest.
    Everything is drawn from the seed; a file replaces the weights of `layers`, never the projection.
    """

    def __init__(self, input_shape: tuple[int, ...], seed: int) -> None:
        """Draw all weights from the seed. Raises ConfigError unless inputs are images of 1 or 3 channels."""
        super().__init__(input_shape)
        if len(input_shape) != 3 or input_shape[0] not in (1, COLOURS):
            raise ConfigError(
                f"digests.encoder.name: found 'mobilenet_v2' with inputs of shape {tuple(input_shape)}; "
                f"allowed for images of 1 or {COLOURS} channels; random and autoencoder read others"
            )
        with seeded_initialisation(seed, "encoder"):
            network, width = mobilenet_v2((COLOURS, MOBILE_SIDE, MOBILE_SIDE), "batch", attends=False)
        layers = network.features
        assert isinstance(layers, nn.Sequential)
        self.layers = layers
        rows, self.height, self.width = digest_shape(input_shape)
        self.factor = ceil(max(self.height, self.width) / MOBILE_GRID)
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
        x = F.interpolate(x, size=(MOBILE_SIDE, MOBILE_SIDE), mode="bilinear", antialias=True)
        features = F.relu(self.projection(self.layers(x.expand(-1, COLOURS, -1, -1))))
        return F.pixel_shuffle(features, self.factor)[:, :, : self.height, : self.width]


def build_encoder(config: EncoderConfig, input_shape: tuple[int, ...], seed: int) -> FeatureEncoder:
    """The encoder that an experiment names, frozen, on the CPU. seed: the experiment's.

    Raises ConfigError naming the file, and the tensor or key in it, if it is not the file that the
    experiment was read with, or does not fit such inputs.
    """
    if config.name == "mobilenet_v2":
        encoder: FeatureEncoder = MobileNetEncoder(input_shape, seed)
    else:
        encoder = ConvolutionalEncoder(input_shape, seed)
    if config.file is not None and config.sha256 is not None:
        path = Path(config.file)
        if config.name == "autoencoder":
            tensors = read_autoencoder(path, config.sha256, input_shape)
        else:
            tensors = read_torchvision(path, config.sha256)
        try:
            copy_state(_weights(encoder), tensors)
        except StateError as error:
            raise ConfigError(f"{KEY}: {path}: {error}") from error
    return encoder.requires_grad_(False).eval()


def _weights(encoder: FeatureEncoder) -> dict[str, Tensor]:
    """What a file must hold; BatchNorm's counter of batches says nothing about the network."""
    return {name: value for name, value in encoder.layers.state_dict().items() if value.is_floating_point()}


def encoder_hash(encoder: FeatureEncoder) -> str:
    """SHA-256 of the encoder's input shape, names, shapes and bits. A digest of another encoder is stale."""
    digest = hashlib.sha256(str(tuple(encoder.input_shape)).encode())
    for name, tensor in encoder.state_dict().items():
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _layers(input_shape: tuple[int, ...]) -> nn.Sequential:
    if len(input_shape) == 1:
        return nn.Sequential(
            nn.Linear(input_shape[0], 2 * TABLE_DIGEST),
            nn.ReLU(),
            nn.Linear(2 * TABLE_DIGEST, TABLE_DIGEST),
            nn.ReLU(),
        )
    first_stride = 2 if max(input_shape[1:]) > SMALL_SIDE else 1
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 16, 3, stride=first_stride, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 4, 3, stride=2, padding=1),
        nn.ReLU(),
    )


def _to_canvas(x: Tensor) -> Tensor:
    """Images above 16 pixels on a 32x32 canvas: padded with zeros if smaller, averaged down if larger."""
    height, width = x.shape[2:]
    if max(height, width) <= SMALL_SIDE:
        return x
    if max(height, width) > CANVAS:
        x = F.adaptive_avg_pool2d(x, (min(height, CANVAS), min(width, CANVAS)))
    return F.pad(x, (0, CANVAS - x.shape[3], 0, CANVAS - x.shape[2]))
