"""A network that was trained elsewhere, cut before its classifier, as a fixed map.

Its weights, size and preprocessing are part of the map's hash. Batch normalisation uses
what it learnt there.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perennial.foundation.errors import ConfigError
from perennial.models.feature_maps.config import PretrainedConfig, as_sides
from perennial.models.feature_maps.content import content_of
from perennial.models.feature_maps.packages import PACKAGES
from perennial.models.feature_maps.weights import bare_network, network_name, weights_of


class Pretrained(nn.Module):
    """(B, C, H, W) pixels in 0..255 -> (B, width). Grey images are shown as grey colours."""

    def __init__(self, network: nn.Module, width: int, size: tuple[int, int] | None, name: str) -> None:
        super().__init__()
        self.network, self.width = network, width
        self.size, self._name = size, name
        self.mean = nn.Parameter(torch.zeros(3, 1, 1), requires_grad=False)
        self.std = nn.Parameter(torch.ones(3, 1, 1), requires_grad=False)

    def forward(self, pixels: Tensor) -> Tensor:
        x = pixels.expand(-1, 3, -1, -1) if pixels.shape[1] == 1 else pixels
        if self.size is not None and self.size != tuple(x.shape[2:]):
            x = F.interpolate(x, size=self.size, mode="bicubic", align_corners=False)
        return self.network((x / 255 - self.mean) / self.std)

    @property
    def about(self) -> str:
        """What its tensors do not say."""
        return f"pretrained {self._name} {self.size}"


def build_pretrained(
    config: PretrainedConfig, shape: tuple[int, ...], with_weights: bool
) -> tuple[Pretrained, dict[str, str]]:
    """The map and what a person should know of it. Raises ConfigError where its weights are not here."""
    if shape[0] not in (1, 3):
        raise ConfigError(f"model.features: pretrained: found images of {shape[0]} channels; allowed 1 or 3")
    network = bare_network(network_name(config))
    size = as_sides(config.image_size)
    width = int(network.num_features)  # pyright: ignore[reportArgumentType]
    module = Pretrained(network, width, size, network_name(config))
    facts = {"network": config.network}
    if with_weights:
        package = PACKAGES.get(config.network)
        weights = weights_of(config.network, config.weights, config.sha256)
        network.load_state_dict(weights)
        with torch.no_grad():
            for name in ("mean", "std"):
                values = getattr(package or config, name)
                getattr(module, name).copy_(torch.tensor(values).view(3, 1, 1))
        licence = package.licence if package is not None else config.licence or "not stated"
        facts |= {"licence": licence, "sha256": content_of([("", weights)])}
    return module, facts
