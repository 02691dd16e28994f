"""A network that was trained elsewhere, cut before its classifier, as a fixed map.

Its weights, size and preprocessing are part of the map's hash. Batch normalisation uses
what it learnt there.
"""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perennial.foundation.errors import ConfigError
from perennial.models.feature_maps.ball import unit_rows
from perennial.models.feature_maps.config import PretrainedConfig, as_sides
from perennial.models.feature_maps.content import content_of
from perennial.models.feature_maps.packages import PACKAGES
from perennial.models.feature_maps.weights import bare_network, network_name, weights_of


class Pretrained(nn.Module):
    """(B, C, H, W) pixels in 0..255 -> (B, width). Grey images are shown as grey colours."""

    def __init__(
        self,
        network: nn.Module,
        size: tuple[int, int] | None,
        name: str,
        stages: Sequence[nn.Module],
        shape: tuple[int, ...],
    ) -> None:
        """size: that images are resized to; None keeps theirs. shape: of one image.

        stages: of the network, whose averages stand beside its last layer.
        """
        super().__init__()
        self.network, self._stages = network, list(stages)
        self.size, self._name = size, name
        self.mean = nn.Parameter(torch.zeros(3, 1, 1), requires_grad=False)
        self.std = nn.Parameter(torch.ones(3, 1, 1), requires_grad=False)
        self.width = int(network.num_features)  # pyright: ignore[reportArgumentType]
        if stages:
            with torch.no_grad():
                self.width = self(torch.zeros(1, *shape)).shape[1]

    def forward(self, pixels: Tensor) -> Tensor:
        x = pixels.expand(-1, 3, -1, -1) if pixels.shape[1] == 1 else pixels
        if self.size is not None and self.size != tuple(x.shape[2:]):
            x = F.interpolate(x, size=self.size, mode="bicubic", align_corners=False)
        x = (x / 255 - self.mean) / self.std
        if not self._stages:
            return self.network(x)
        seen: list[Tensor] = []
        with ExitStack() as hooks:
            for stage in self._stages:
                hooks.callback(stage.register_forward_hook(lambda *call: seen.append(call[-1])).remove)
            last = self.network(x)
        return torch.cat([unit_rows(last), *(unit_rows(maps.mean(dim=(2, 3))) for maps in seen)], dim=1)

    @property
    def about(self) -> str:
        """What its tensors do not say."""
        beside = f" {len(self._stages)} stages" if self._stages else ""
        return f"pretrained {self._name} {self.size}{beside}"


def stages_of(network: nn.Module) -> list[nn.Module]:
    """The parts of a network of timm's after which it has fewer pixels or more channels, in order.

    timm calls them blocks or stages, and those of ResNets layer1 to layer4.
    """
    for name in ("blocks", "stages"):
        if isinstance(parts := getattr(network, name, None), nn.Sequential):
            return list(parts)
    return [part for name, part in network.named_children() if name.startswith("layer")]


def build_pretrained(
    config: PretrainedConfig, shape: tuple[int, ...], with_weights: bool
) -> tuple[Pretrained, dict[str, str]]:
    """The map and what a person should know of it. Raises ConfigError where its weights are not here."""
    if shape[0] not in (1, 3):
        raise ConfigError(f"model.features: pretrained: found images of {shape[0]} channels; allowed 1 or 3")
    network = bare_network(network_name(config))
    size = as_sides(config.image_size)
    stages = stages_of(network)
    if config.stages > len(stages):
        raise ConfigError(
            f"model.features: pretrained: found stages {config.stages}; {config.network} has {len(stages)}: "
            f"allowed 0 to {len(stages)}"
        )
    used = stages[len(stages) - config.stages :]
    module = Pretrained(network, size, network_name(config), used, shape)
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
