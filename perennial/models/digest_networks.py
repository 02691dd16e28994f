"""FedDig's networks: the encoder of digests, what stands in for a site, and the model that reads both.

A digest is a mixture of features of several samples under a random encoder P_R, the same at sites and server,
which nobody trains. The server turns it into guidance, an input of the model, with a network that it trains.
The model reads input and digest in two branches.

Shapes: x (B, *input_shape); r (B, *digest_shape), never below 0; digest_shape is (4, h, w) for images and
(64,) for tables.
"""

import hashlib
from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perennial.foundation.streams import stream
from perennial.models.incremental import IncrementalModel, join_features
from perennial.models.layers import draw_kaiming_uniform, seed_initialisation

CANVAS = 32
"""Images above 16 pixels are brought to this side, so that a digest always has 256 numbers."""
SMALL_SIDE = 16
TABLE_DIGEST = 64


def compute_digest_shape(input_shape: tuple[int, ...]) -> tuple[int, ...]:
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
        with seed_initialisation(seed, "encoder"):
            self.layers = _build_layers(input_shape)
        # PyTorch's normal and uniform draws may differ in the last bit between processors; the hash would too
        generator = stream(seed, "init", "encoder")
        with torch.no_grad():
            for name, parameter in self.layers.named_parameters():
                if name.endswith("weight"):
                    parameter.copy_(draw_kaiming_uniform(tuple(parameter.shape), 0.0, generator))
                else:
                    parameter.zero_()
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(_to_canvas(x) if x.dim() == 4 else x)


def hash_encoder(encoder: FeatureEncoder) -> str:
    """SHA-256 of the encoder's input shape, names, shapes and bits. A digest of another encoder is stale."""
    digest = hashlib.sha256(str(tuple(encoder.input_shape)).encode())
    for name, tensor in encoder.state_dict().items():
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _build_layers(input_shape: tuple[int, ...]) -> nn.Sequential:
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


FUSED_WIDTH = 128


class GuidanceProducer(nn.Module):
    """P_G: digest (B, *digest_shape) -> guidance (B, *input_shape). Lives and is trained at the server only.

    Images come out in [0, 1], as pixels do: normalise them as any image before the
    model. Tables are unbounded.
    """

    def __init__(self, input_shape: tuple[int, ...], seed: int) -> None:
        super().__init__()
        self.input_shape = input_shape
        with seed_initialisation(seed, "guidance"):
            self.layers = _build_guidance_layers(input_shape)

    def forward(self, digest: Tensor) -> Tensor:
        guidance = self.layers(digest)
        return _from_canvas(guidance, self.input_shape) if guidance.dim() == 4 else guidance


class TwoBranchBackbone(nn.Module):
    """[F_R(x), F_D(r)] and the classifier's hidden layer: (B, *input_shape), (B, *digest_shape) -> (B, 128).

    image: the backbone F_R, of feature_width d. F_D has d features too, so that both branches weigh the same.
    """

    join = staticmethod(join_features)

    def __init__(self, image: nn.Module, feature_width: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.image = image
        self.digest = _build_digest_branch(compute_digest_shape(input_shape), feature_width)
        self.fuse = nn.Linear(2 * feature_width, FUSED_WIDTH)

    def forward(self, x: Tensor, digest: Tensor) -> Tensor:
        return F.relu(self.fuse(self.join([self.image(x), self.digest(digest)])))


class DigestTwoBranchModel(IncrementalModel):
    """A model C([F_R(x), F_D(P_R(x))]) with a frozen encoder P_R, which never travels.

    Keys: "backbone.image.", "backbone.digest.", "backbone.fuse.", "head.", in the complete state "encoder.".
    """

    def __init__(
        self,
        backbone: TwoBranchBackbone,
        encoder: FeatureEncoder,
        num_classes: int,
        generator: np.random.Generator,
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(backbone, FUSED_WIDTH, num_classes, generator, dropout=dropout)
        self.encoder = encoder

    def features(self, x: Tensor) -> Tensor:
        return self.backbone(x, self.encoder(x))

    def forward_digest(self, guidance: Tensor, digest: Tensor) -> Tensor:
        """Logits (B, M) from stored digests (B, *digest_shape) and their guidance (B, *input_shape)."""
        return self.classify(self.backbone(guidance, digest))


def _build_guidance_layers(input_shape: tuple[int, ...]) -> nn.Sequential:
    if len(input_shape) == 1:
        return nn.Sequential(
            nn.Linear(TABLE_DIGEST, 2 * TABLE_DIGEST), nn.ReLU(), nn.Linear(2 * TABLE_DIGEST, input_shape[0])
        )
    colours = input_shape[0]
    if max(input_shape[1:]) > SMALL_SIDE:
        up, out = nn.ConvTranspose2d(4, 32, 4, 2, 1), nn.ConvTranspose2d(32, colours, 4, 2, 1)
    else:
        up, out = nn.ConvTranspose2d(4, 16, 4, 2, 1), nn.Conv2d(16, colours, 3, padding=1)
    return nn.Sequential(up, nn.ReLU(), out, nn.Sigmoid())


def _build_digest_branch(shape: tuple[int, ...], width: int) -> nn.Sequential:
    if len(shape) == 1:
        return nn.Sequential(OrderedDict(fc=nn.Linear(shape[0], width), relu=nn.ReLU()))
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(shape[0], 32, 3, padding=1),
            relu1=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc=nn.Linear(32 * (shape[1] // 2) * (shape[2] // 2), width),
            relu2=nn.ReLU(),
        )
    )


def _from_canvas(guidance: Tensor, input_shape: tuple[int, ...]) -> Tensor:
    """The image part of what the canvas holds, at the size of the images."""
    height, width = input_shape[1:]
    guidance = guidance[:, :, : min(height, CANVAS), : min(width, CANVAS)]
    if guidance.shape[2:] == (height, width):
        return guidance
    return F.interpolate(guidance, size=(height, width), mode="bilinear", align_corners=False)
