"""FedDig's networks: digests of features that stand in for an absent site, and the model that reads them.

A digest is a mixture of fixed features of several samples (digest_encoders.py). The server turns it into
guidance, an input of the model, with a network that it trains; the model reads input and
digest in two branches.

Shapes: x (B, *input_shape); r (B, *digest_shape); digest_shape is (4, h, w) for images and (64,) for tables.
"""

from collections import OrderedDict

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F

from perennial.models.digest_encoders import CANVAS, SMALL_SIDE, TABLE_DIGEST, FeatureEncoder, digest_shape
from perennial.models.incremental import IncrementalModel, joined_features
from perennial.models.initialisation import seeded_initialisation

FUSED_WIDTH = 128


class GuidanceProducer(nn.Module):
    """P_G: digest (B, *digest_shape) -> guidance (B, *input_shape). Lives and is trained at the server only.

    Images come out in [0, 1], as pixels do: normalise them as any image before the
    model. Tables are unbounded.
    """

    def __init__(self, input_shape: tuple[int, ...], seed: int) -> None:
        super().__init__()
        self.input_shape = input_shape
        with seeded_initialisation(seed, "guidance"):
            self.layers = _guidance_layers(input_shape)

    def forward(self, digest: Tensor) -> Tensor:
        guidance = self.layers(digest)
        return _from_canvas(guidance, self.input_shape) if guidance.dim() == 4 else guidance


class TwoBranchBackbone(nn.Module):
    """[F_R(x), F_D(r)] and the classifier's hidden layer: (B, *input_shape), (B, *digest_shape) -> (B, 128).

    image: the backbone F_R, of feature_width d. F_D has d features too, so that both branches weigh the same.
    """

    join = staticmethod(joined_features)

    def __init__(self, image: nn.Module, feature_width: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.image = image
        self.digest = _digest_branch(digest_shape(input_shape), feature_width)
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


def _guidance_layers(input_shape: tuple[int, ...]) -> nn.Sequential:
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


def _digest_branch(shape: tuple[int, ...], width: int) -> nn.Sequential:
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
