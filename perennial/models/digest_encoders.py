"""FedDig's feature encoder P_R: a random network that nobody trains, the same at sites and server.

Shapes: x (B, *input_shape); r (B, *digest_shape), never below 0; digest_shape is (4, h, w) for images and
(64,) for tables.
"""

import hashlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perennial.foundation.streams import stream
from perennial.models.initialisation import kaiming_uniform, seeded_initialisation

CANVAS = 32
"""Images above 16 pixels are brought to this side, so that a digest always has 256 numbers."""
SMALL_SIDE = 16
TABLE_DIGEST = 64


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
    """x -> r >= 0, for each sample by itself: two layers, drawn from the seed, with the same bits everywhere.

    input_shape: (C, H, W) or (D,).
    """

    def __init__(self, input_shape: tuple[int, ...], seed: int) -> None:
        super().__init__()
        self.input_shape = input_shape
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
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(_to_canvas(x) if x.dim() == 4 else x)


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
