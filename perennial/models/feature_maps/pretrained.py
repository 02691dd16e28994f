"""A network that was trained elsewhere, cut before its classifier, as a fixed map.

Its weights, size and preprocessing are part of the map's hash. Batch normalisation uses
what it learnt there, folded into the convolution before it, in float64: the same bits on every machine, in
two thirds of the time.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from perennial.foundation.errors import ConfigError
from perennial.models.feature_maps.config import PACKAGES, PretrainedConfig, as_sides
from perennial.models.feature_maps.projection import hash_content, normalise_rows
from perennial.models.feature_maps.weights import build_bare_network, load_weights, name_network


class Pretrained(nn.Module):
    """(B, C, H, W) pixels in 0..255 -> (B, width) features. Grey images get three equal channels.

    For networks of tokens, the features are the class token and the mean of the patches' tokens.
    """

    def __init__(
        self,
        network: nn.Module,
        size: tuple[int, int] | None,
        name: str,
        stages: Sequence[nn.Module],
        shape: tuple[int, ...],
    ) -> None:
        """size: to which images are resized; None keeps theirs. shape: of one image. name: for the hash.

        stages: of the network, whose averages are features beside those of its last layer.
        """
        super().__init__()
        self.network, self._stages = network, list(stages)
        self.size = size
        self.about = f"pretrained {name} {size}" + (f" {len(stages)} stages" if stages else "")
        self.mean = nn.Parameter(torch.zeros(3, 1, 1), requires_grad=False)
        self.std = nn.Parameter(torch.ones(3, 1, 1), requires_grad=False)
        with torch.no_grad():
            self.width = self(torch.zeros(1, *shape)).shape[1]

    def forward(self, pixels: Tensor) -> Tensor:
        x = pixels.expand(-1, 3, -1, -1) if pixels.shape[1] == 1 else pixels
        if self.size is not None and self.size != tuple(x.shape[2:]):
            x = F.interpolate(x, size=self.size, mode="bicubic", align_corners=False)
        x = pad_to_patches((x / 255 - self.mean) / self.std, self.network)
        seen: list[Tensor] = []
        with ExitStack() as hooks:
            for stage in self._stages:
                hooks.callback(stage.register_forward_hook(lambda *call: seen.append(call[-1])).remove)
            last = self._last(x)
        if not self._stages:
            return last
        return torch.cat(
            [normalise_rows(last), *(normalise_rows(self._averaged(maps)) for maps in seen)], dim=1
        )

    def _last(self, x: Tensor) -> Tensor:
        if not has_tokens(self.network):
            return self.network(x)
        tokens: Tensor = self.network.forward_features(x)  # pyright: ignore[reportCallIssue]
        patches = self._averaged(tokens)
        return torch.cat([tokens[:, 0], patches], dim=1) if _count_leading(self.network) else patches

    def _averaged(self, maps: Tensor) -> Tensor:
        """(B, channels): the mean over the image, or over its tokens."""
        if maps.ndim == 3:
            return maps[:, _count_leading(self.network) :].mean(dim=1)
        channels_last = getattr(self.network, "output_fmt", None) == "NHWC"
        return maps.mean(dim=(1, 2) if channels_last else (2, 3))


def has_tokens(network: nn.Module) -> bool:
    """Whether a network's features are tokens: of patches, and of a class if it has one."""
    return hasattr(network, "num_prefix_tokens")


def _count_leading(network: nn.Module) -> int:
    """Tokens before those of patches: of a class, and registers."""
    return int(getattr(network, "num_prefix_tokens", 0))


def pad_to_patches(x: Tensor, network: nn.Module) -> Tensor:
    """Pad images with zeros to the right and below, up to whole patches if the network cuts into patches."""
    rows, columns = _find_patch_size(network)
    height, width = x.shape[2:]
    missing = -width % columns, -height % rows
    return F.pad(x, (0, missing[0], 0, missing[1])) if any(missing) else x


def _find_patch_size(network: nn.Module) -> tuple[int, int]:
    """(height, width) in pixels of a patch; (1, 1) where images are read as they are."""
    if not hasattr(network, "set_input_size"):
        return 1, 1
    size: Any = getattr(getattr(network, "patch_embed", None), "patch_size", (1, 1))
    return int(size[0]), int(size[1])


def set_input_size(network: nn.Module, size: tuple[int, ...]) -> None:
    """Resample, in float64 and in place, the position embeddings of a network that has one for each patch.

    size: (H, W) of images before they are padded. Other networks are left alone.
    """
    if not hasattr(network, "set_input_size"):
        return
    whole = tuple(side + -side % patch for side, patch in zip(size, _find_patch_size(network), strict=True))
    network.double()
    network.set_input_size(img_size=whole)  # pyright: ignore[reportCallIssue]
    network.float()


def list_stages(network: nn.Module) -> list[nn.Module]:
    """The parts of a network of timm's after which it has fewer pixels or more channels, in order.

    timm calls them blocks, stages or layers, and those of ResNets layer1 to layer4. Each block of a network
    of tokens is one.
    """
    for name in ("blocks", "stages", "layers"):
        if isinstance(parts := getattr(network, name, None), nn.Sequential | nn.ModuleList):
            return list(parts)
    return [part for name, part in network.named_children() if name.startswith("layer")]


def build_pretrained(
    config: PretrainedConfig, shape: tuple[int, ...], with_weights: bool
) -> tuple[Pretrained, dict[str, str]]:
    """(the map, facts about it for whoever approves it). Raises ConfigError if its weights are missing."""
    if shape[0] not in (1, 3):
        raise ConfigError(f"model.features: pretrained: found images of {shape[0]} channels; allowed 1 or 3")
    network = build_bare_network(name_network(config))
    size = as_sides(config.image_size)
    facts = {"network": config.network}
    package = PACKAGES.get(config.network)
    if with_weights:
        weights = load_weights(config.network, config.weights, config.sha256)
        try:
            network.load_state_dict(weights)
        except RuntimeError as error:
            raise ConfigError(
                "model.features: pretrained: the weights are not those of timm's "
                f"{name_network(config)}: {error}"
            ) from error
        licence = package.licence if package is not None else config.licence or "not stated"
        facts |= {"licence": licence, "sha256": hash_content([("", weights)])}
    stages = list_stages(network)
    if config.stages > len(stages):
        raise ConfigError(
            f"model.features: pretrained: found stages {config.stages}; {config.network} has {len(stages)}: "
            f"allowed 0 to {len(stages)}"
        )
    used = stages[len(stages) - config.stages :]
    try:
        set_input_size(network, size or shape[1:])
        module = Pretrained(network, size, name_network(config), used, shape)
    except (AssertionError, RuntimeError, ValueError) as error:
        sides = "x".join(map(str, size or shape[1:]))
        raise ConfigError(
            f"model.features: pretrained: {config.network} cannot read images of {sides} pixels ({error}); "
            "allowed: another image_size"
        ) from error
    if with_weights:
        with torch.no_grad():
            for name in ("mean", "std"):
                values = getattr(package or config, name)
                getattr(module, name).copy_(torch.tensor(values).view(3, 1, 1))
    return module, facts


def fold(network: nn.Module) -> None:
    """Replace each convolution and the batch normalisation after it by one convolution with a bias, in place.

    network: of timm's, which names each normalisation right after the convolution whose output it reads.
    """
    for part in network.children():
        fold(part)
    children = list(network.named_children())
    for (first, convolution), (second, normalisation) in pairwise(children):
        if isinstance(convolution, nn.Conv2d) and isinstance(normalisation, _BatchNorm):
            setattr(network, first, _fold_pair(convolution, normalisation))
            # timm's layer of normalisation computes the activation too
            setattr(network, second, getattr(normalisation, "act", nn.Identity()))


@torch.no_grad()
def _fold_pair(convolution: nn.Conv2d, normalisation: _BatchNorm) -> nn.Conv2d:
    """In place: the convolution, which normalises."""
    assert normalisation.running_mean is not None and normalisation.running_var is not None
    scale = normalisation.weight.double() / torch.sqrt(normalisation.running_var.double() + normalisation.eps)
    before = torch.zeros_like(scale) if convolution.bias is None else convolution.bias.double()
    shift = (before - normalisation.running_mean.double()) * scale + normalisation.bias.double()
    convolution.weight.copy_(convolution.weight.double() * scale[:, None, None, None])
    convolution.bias = nn.Parameter(shift.to(convolution.weight.dtype), requires_grad=False)
    return convolution
