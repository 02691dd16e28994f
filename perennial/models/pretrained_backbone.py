"""A network that was trained elsewhere as the backbone of a gradient learner, which fine-tunes it.

Batch normalisation keeps the statistics that it learnt there, because those of a site's own batches mislead
where sites hold different classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from perennial.foundation.errors import ConfigError
from perennial.models.feature_maps.config import PretrainedConfig
from perennial.models.feature_maps.pixels import Constants
from perennial.models.feature_maps.pretrained import build_pretrained, filled_up, reads_tokens


class PretrainedBackbone(nn.Module):
    """(B, C, H, W) normalised inputs -> (B, width) features. Grey images get three equal channels."""

    def __init__(
        self, network: nn.Module, size: tuple[int, int] | None, scale: Tensor, shift: Tensor
    ) -> None:
        """network: (B, 3, H, W) -> (B, width). size: to which images are resized; None keeps theirs.

        scale, shift: (3, 1, 1), convert this project's normalised inputs to the network's own.
        """
        super().__init__()
        self.network, self._size = network, size
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.shift = nn.Parameter(shift, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = (x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x) * self.scale + self.shift
        if self._size is not None and self._size != tuple(x.shape[2:]):
            x = F.interpolate(x, size=self._size, mode="bicubic", align_corners=False)
        return self.network(filled_up(x, self.network))

    def train(self, mode: bool = True) -> "PretrainedBackbone":
        """Set training mode for all but batch normalisation, which keeps its statistics."""
        super().train(mode)
        for module in self.network.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
        return self


def build_pretrained_backbone(
    config: PretrainedConfig,
    input_shape: tuple[int, ...],
    constants: Constants | None,
    *,
    with_weights: bool = True,
) -> tuple[PretrainedBackbone, int]:
    """(the backbone, its number of features).

    constants: mean and std of the inputs; None with with_weights False, if a saved model brings all.
    Raises ConfigError if the weights are missing, or a key has no meaning here.
    """
    if len(input_shape) != 3:
        raise ConfigError(
            f"model.name: found 'pretrained', which reads images (channels, height, width), but the data has "
            f"shape {input_shape}; allowed for tables: mlp"
        )
    if config.stages:
        raise ConfigError(
            f"model.features.stages: found {config.stages}; allowed 0, and others with model features: "
            "what is trained here ends with the network's last layer"
        )
    for key in ("symmetry", "tiles"):
        if config.is_set(key):
            raise ConfigError(
                f"model.features.{key}: found {getattr(config, key)!r}; allowed with model features alone: "
                "what is trained here sees each image as it is"
            )
    fixed, _ = build_pretrained(config, input_shape, with_weights)
    mean, std = (torch.zeros(1), torch.ones(1)) if constants is None else constants
    mean, std = mean.float().view(-1, 1, 1), std.float().view(-1, 1, 1)
    scale = (std / fixed.std).expand(3, 1, 1).clone()
    shift = ((mean - fixed.mean) / fixed.std).expand(3, 1, 1).clone()
    network = fixed.network
    width = int(network.num_features) if reads_tokens(network) else fixed.width  # pyright: ignore
    network.requires_grad_(True)
    return PretrainedBackbone(network, fixed.size, scale.detach(), shift.detach()), width
