"""FedDig's feature encoders P_R: networks that the federation never trains, the same at sites and server.

A random one holds nothing of anybody's data; a trained one holds something of what it was trained on.

Shapes: x (B, *input_shape); r (B, *digest_shape), never below 0; digest_shape is (4, h, w) for images and
(64,) for tables.
"""

import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perennial.foundation.errors import ConfigError, StateError
from perennial.foundation.streams import stream
from perennial.models.config import EncoderConfig
from perennial.models.encoder_file import KEY, read_autoencoder, read_torchvision
from perennial.models.incremental import copy_state
from perennial.models.initialisation import kaiming_uniform, seeded_initialisation

CANVAS = 32
"""Images above 16 pixels are brought to this side, so that a digest always has 256 numbers."""
SMALL_SIDE = 16
TABLE_DIGEST = 64


def digest_shape(input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of one sample's encoded features: (4, 8, 8) for images above 16 pixels, half the sides below."""
    if len(input_shape) == 1:
        return (TABLE_DIGEST,)
    height, width = input_shape[1:]
    if max(height, width) > SMALL_SIDE:
        return (4, CANVAS // 4, CANVAS // 4)
    return (4, (height + 1) // 2, (width + 1) // 2)


class FeatureEncoder(nn.Module):
    """x -> r >= 0, of each sample alone. layers: what a file holds the weights of."""

    layers: nn.Sequential

    def __init__(self, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.input_shape = input_shape

    def train(self, mode: bool = True) -> "FeatureEncoder":
        """Stays in evaluation mode, whatever the model around it does: its statistics are fixed too."""
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


def build_encoder(config: EncoderConfig, input_shape: tuple[int, ...], seed: int) -> FeatureEncoder:
    """The encoder that an experiment names, frozen, on the CPU. seed: the experiment's.

    Raises ConfigError naming the file, and the tensor or key in it, where it is not the one that the
    experiment was read with, or does not fit such inputs.
    """
    if config.name == "mobilenet_v2":
        # imported here: torchvision is slow to import, and few experiments need it
        from perennial.models.mobilenet_encoder import MobileNetEncoder

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
