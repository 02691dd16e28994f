"""The `model` block of an experiment."""

import operator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from perennial.foundation.errors import suggest_nearest
from perennial.foundation.plain import Block, Plain
from perennial.foundation.plugins import is_target, list_known
from perennial.models.feature_maps.config import (
    Choice,
    FeatureMapConfig,
    OneMap,
    PretrainedConfig,
    RandomMapConfig,
)
from perennial.models.feature_maps.config import Size as Count

Norm = Literal["none", "group", "batch"]
Size = Annotated[int, Field(gt=0, le=65_536)]

RESIDUAL = ("resnet20", "resnet18", "resnet34", "mobilenet_v2")
CONVOLUTIONAL = ("small_cnn", "se_cnn", *RESIDUAL)
COMPOSITE = ("dual_backbone", "digest_two_branch")
BACKBONES = ("mlp", *CONVOLUTIONAL)
NETWORKS = (*BACKBONES, *COMPOSITE, "features", "pretrained")
"""features: a linear head on fixed maps, which are not trained. pretrained: a network trained elsewhere."""
FIRST_CHANNELS = {"se_cnn": 16, "resnet20": 16, "resnet18": 64, "resnet34": 64, "mobilenet_v2": 32}
"""Channels after the first convolution; small_cnn takes them from `channels`."""

_TAKEN_BY: dict[str, tuple[str, ...]] = {
    "hidden": ("mlp",),
    "channels": ("small_cnn",),
    "width": ("small_cnn",),
    "squeeze_excitation": CONVOLUTIONAL,
}


def _check_network(name: str) -> str:
    if name not in NETWORKS and not is_target(name):
        allowed = list_known("model", NETWORKS)
        raise ValueError(f"allowed: {', '.join(allowed)}{suggest_nearest(name, allowed)}")
    return name


def _check_backbone(name: str) -> str:
    if name in (*COMPOSITE, "features", "pretrained"):
        raise ValueError(f"allowed: {', '.join(list_known('model', BACKBONES))}")
    return _check_network(name)


def _extract_width(value: Any) -> Any:
    """The width of a projection as 0.2.0 wrote it, {width, images, seed}, whose others have one value now."""
    if not isinstance(value, dict):
        return value
    others = {key: found for key, found in value.items() if key != "width"}
    if not others.items() <= {"images": 2000, "seed": 0}.items():
        raise ValueError(f"found {others}, allowed a width alone; images are 2000 and the seed is 0")
    return value.get("width", 96)


class ModelConfig(Block):
    """Which network learns. An option that the chosen network does not take is an error."""

    name: Annotated[str, AfterValidator(_check_network)]
    backbone: Annotated[str, AfterValidator(_check_backbone)] | None = None
    """The network inside dual_backbone and digest_two_branch."""
    hidden: tuple[Size, ...] = Field(default=(64,), max_length=64)
    """mlp: widths of the hidden layers; the last one is the feature width. []: the head alone, a linear
    classifier of the inputs."""
    channels: tuple[Size, Size] = (16, 32)
    """small_cnn: channels of the two convolutions."""
    width: Size = 64
    """small_cnn: feature width."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the features that is dropped before the head, in training."""
    norm: Norm | None = None
    """None: the network's default, which is none for mlp, small_cnn and se_cnn, and group for the others.
    Batch statistics mislead when sites hold different classes, and DP-SGD cannot use them."""
    squeeze_excitation: bool | None = None
    """Channel attention after the first convolution (Hu et al. 2018, arXiv 1709.01507). null: se_cnn has
    it, and no other network."""
    features: tuple[FeatureMapConfig, ...] | None = Field(default=None, exclude_if=operator.not_)
    """features: the maps, side by side; a list in the place of one is a choice. In a file also auto, in whose
    place the maps are written that fit the data's kind and shape. pretrained: the network that learns on."""
    projection: Annotated[Count | None, BeforeValidator(_extract_width)] = Field(
        default=None, exclude_if=operator.not_
    )
    """features: so many whitened components of public images behind each map."""
    options: dict[str, Plain] = Field(default_factory=dict, exclude_if=operator.not_)
    """Keys of a network that is a plug-in: the keywords of its constructor after the input shape."""

    @property
    def choices(self) -> list[Choice]:
        """The feature maps that are choices among several, not yet made."""
        return [found for found in self.features or () if isinstance(found, tuple)]

    @property
    def backbone_name(self) -> str:
        """The network that reads the input: `backbone` where there is one, else `name`."""
        return self.backbone or self.name

    @property
    def maps(self) -> tuple[OneMap, ...]:
        """Fixed maps, with all alternatives, and a pretrained backbone; () if all is trained anew."""
        found: list[OneMap] = []
        for each in self.features or ():
            found += each if isinstance(each, tuple) else (each,)
        return tuple(found)

    @property
    def pretrained(self) -> PretrainedConfig | None:
        """The network that was trained elsewhere and learns on; None with every other model."""
        found = self.features[0] if self.name == "pretrained" and self.features else None
        return found if isinstance(found, PretrainedConfig) else None

    @property
    def resolved_norm(self) -> Norm:
        return self.norm or ("group" if self.backbone_name in RESIDUAL else "none")

    @property
    def has_squeeze_excitation(self) -> bool:
        if self.squeeze_excitation is None:
            return self.backbone_name == "se_cnn"
        return self.squeeze_excitation

    @model_validator(mode="after")
    def _check_composite(self) -> "ModelConfig":
        if self.name in COMPOSITE and self.backbone is None:
            raise ValueError(f"key 'backbone' is missing; {self.name} needs one of {', '.join(BACKBONES)}")
        if self.name not in COMPOSITE and self.backbone is not None:
            raise ValueError(
                f"key 'backbone': found {self.backbone!r}, but {self.name} is a backbone itself; "
                f"allowed with {' and '.join(COMPOSITE)}{suggest_nearest(self.name, COMPOSITE)}"
            )
        return self

    @model_validator(mode="after")
    def _check_features(self) -> "ModelConfig":
        if self.name == "features" and not self.features:
            raise ValueError(
                "key 'features' is missing; allowed: inputs, random, patches, pretrained, or several"
            )
        if self.name == "pretrained" and (self.pretrained is None or len(self.maps) > 1):
            raise ValueError("key 'features': model pretrained needs one map of the name pretrained")
        if self.name != "features" and self.projection is not None:
            raise ValueError(f"key 'projection': {self.name} does not take it; allowed with name features")
        if self.name not in ("features", "pretrained") and self.features is not None:
            raise ValueError(
                f"key 'features': {self.name} does not take it; allowed with name features or pretrained"
            )
        if self.choices and self.projection is not None:
            raise ValueError("key 'features': found a choice with 'projection'; choose one")
        if self.projection is not None and any(isinstance(m, RandomMapConfig) for m in self.maps):
            raise ValueError(
                "key 'projection': a random map reads inputs by an experiment's own constants; allowed with "
                "inputs, patches and pretrained"
            )
        return self

    @model_validator(mode="after")
    def _check_options(self) -> "ModelConfig":
        for key, names in _TAKEN_BY.items():
            # compared with the default, not asked of model_fields_set: a resolved experiment writes every key
            value, default = getattr(self, key), type(self).model_fields[key].default
            if value and value != default and self.backbone_name not in names:
                raise ValueError(
                    f"key {key!r}: found {value!r}, but {self.backbone_name} does not take it; "
                    f"allowed with {', '.join(names)}"
                )
        if self.options and self.backbone_name in BACKBONES:
            raise ValueError(
                f"key 'options': found {sorted(self.options)}, which are for plug-ins; {self.backbone_name} "
                "takes keys of the model block itself"
            )
        if self.has_squeeze_excitation and min(self.channels) < 2:
            raise ValueError(f"key 'channels': found {self.channels}; channel attention allows 2 or more")
        if self.norm == "none" and self.backbone_name in RESIDUAL:
            raise ValueError(
                f"key 'norm': found 'none', but {self.backbone_name} does not train without one; "
                "allowed: group, batch"
            )
        return self
