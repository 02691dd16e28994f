"""The `model` block of an experiment."""

import operator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from perennial.foundation.block import Block
from perennial.foundation.errors import nearest
from perennial.foundation.plain import Plain
from perennial.foundation.plugins import is_target, known
from perennial.models.feature_maps.config import (
    ChoiceConfig,
    ExpansionConfig,
    FeatureMapConfig,
    ModelMapConfig,
    PretrainedConfig,
    ProjectionConfig,
    RandomMapConfig,
    RunLayout,
)

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


def _network(name: str) -> str:
    if name not in NETWORKS and not is_target(name):
        allowed = known("model", NETWORKS)
        raise ValueError(f"allowed: {', '.join(allowed)}{nearest(name, allowed)}")
    return name


def _backbone(name: str) -> str:
    if name in (*COMPOSITE, "features", "pretrained"):
        raise ValueError(f"allowed: {', '.join(known('model', BACKBONES))}")
    return _network(name)


class ModelConfig(Block):
    """Which network learns. An option that the chosen network does not take is an error."""

    name: Annotated[str, AfterValidator(_network)]
    backbone: Annotated[str, AfterValidator(_backbone)] | None = None
    """The network inside dual_backbone and digest_two_branch."""
    hidden: tuple[Size, ...] = Field((64,), max_length=64)
    """mlp: widths of the hidden layers; the last one is the feature width. []: the head alone, a linear
    classifier of the inputs."""
    channels: tuple[Size, Size] = (16, 32)
    """small_cnn: channels of the two convolutions."""
    width: Size = 64
    """small_cnn: feature width."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of the features that is dropped before the head, in training."""
    norm: Norm | None = None
    """None: the network's default, which is none for mlp, small_cnn and se_cnn, and group for the others.
    Batch statistics mislead when sites hold different classes, and DP-SGD cannot use them."""
    squeeze_excitation: bool | None = None
    """Channel attention after the first convolution (Hu et al. 2018, arXiv 1709.01507). null: se_cnn has
    it, and no other network."""
    features: Annotated[tuple[FeatureMapConfig, ...], Field(min_length=1)] | None = Field(
        default=None, exclude_if=operator.not_
    )
    """features: the maps, side by side. In a file also auto, in whose place the maps are written that fit the
    data's kind and shape."""
    expansion: ExpansionConfig | None = Field(default=None, exclude_if=operator.not_)
    """features: random ReLU features behind the maps."""
    projection: ProjectionConfig | None = Field(default=None, exclude_if=operator.not_)
    """features: whitened components of public images behind each map."""
    pretrained: PretrainedConfig | None = Field(default=None, exclude_if=operator.not_)
    """pretrained: the network and its weights."""
    trained_blocks: Annotated[int, Field(ge=0)] | Literal["all"] = Field(
        default="all", exclude_if=lambda value: value == "all"
    )
    """pretrained: how many of its last blocks learn on; 0: the head alone. What is frozen never travels."""
    options: dict[str, Plain] = Field(default_factory=dict, exclude_if=operator.not_)
    """Keys of a network that is a plug-in: the keywords of its constructor after the input shape."""

    @property
    def choices(self) -> list[ChoiceConfig]:
        """The feature maps that are choices among several, not yet made."""
        return [found for found in self.features or () if isinstance(found, ChoiceConfig)]

    @property
    def backbone_name(self) -> str:
        """The network that reads the input: `backbone` where there is one, else `name`."""
        return self.backbone or self.name

    @property
    def maps(self) -> tuple[FeatureMapConfig, ...]:
        """Fixed maps, with all alternatives, and a pretrained backbone; () if all is trained anew."""
        found: list[FeatureMapConfig] = [] if self.pretrained is None else [self.pretrained]
        for each in self.features or ():
            found += each.of if isinstance(each, ChoiceConfig) else (each,)
        return tuple(found)

    @property
    def resolved_norm(self) -> Norm:
        return self.norm or ("group" if self.backbone_name in RESIDUAL else "none")

    @property
    def has_squeeze_excitation(self) -> bool:
        if self.squeeze_excitation is None:
            return self.backbone_name == "se_cnn"
        return self.squeeze_excitation

    @model_validator(mode="after")
    def _one_backbone(self) -> "ModelConfig":
        if self.name in COMPOSITE and self.backbone is None:
            raise ValueError(f"key 'backbone' is missing; {self.name} needs one of {', '.join(BACKBONES)}")
        if self.name not in COMPOSITE and self.backbone is not None:
            raise ValueError(
                f"key 'backbone': found {self.backbone!r}, but {self.name} is a backbone itself; "
                f"allowed with {' and '.join(COMPOSITE)}{nearest(self.name, COMPOSITE)}"
            )
        return self

    @model_validator(mode="after")
    def _maps_of_features(self) -> "ModelConfig":
        if self.name == "features" and self.features is None:
            raise ValueError(
                "key 'features' is missing; allowed: inputs, random, patches, pretrained, or several"
            )
        if self.name == "pretrained" and self.pretrained is None:
            raise ValueError("key 'pretrained' is missing; allowed: {network: ...}, as among features")
        if self.projection is not None and self.expansion is not None:
            raise ValueError("key 'projection': stands behind the maps, as 'expansion' does; choose one")
        if self.choices and (self.projection is not None or self.expansion is not None):
            raise ValueError("key 'features': found a choice with 'projection' or 'expansion'; choose one")
        if self.projection is not None and any(isinstance(m, RandomMapConfig) for m in self.features or ()):
            raise ValueError(
                "key 'projection': a random map reads inputs by an experiment's own constants; allowed with "
                "inputs, patches, pretrained and model"
            )
        taken = {
            "features": "features",
            "expansion": "features",
            "projection": "features",
            "pretrained": "pretrained",
        }
        for key, name in taken.items():
            if self.name != name and getattr(self, key) is not None:
                raise ValueError(f"key {key!r}: {self.name} does not take it; allowed with name {name}")
        if self.name != "pretrained" and self.trained_blocks != "all":
            raise ValueError(
                f"key 'trained_blocks': {self.name} does not take it; allowed with name pretrained"
            )
        return self

    @model_validator(mode="after")
    def _options_of_the_backbone(self) -> "ModelConfig":
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


# a finished run's network is described by a `model` block itself
for _described in (RunLayout, ModelMapConfig):
    _described.model_rebuild()
ModelConfig.model_rebuild(force=True)
