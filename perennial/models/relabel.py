"""Renames the hidden neurons of a model without changing what it computes.

A ring that relabels before each hand-over breaks the naive, index by index comparison of successive models.
It is obfuscation and no privacy guarantee: weight matching undoes it (Ainsworth et al. 2023, arXiv
2209.04836).

TriCon-SF leaves its "layer shuffle" undefined; this is a reading that keeps a shared network intact.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from perennial.foundation.errors import ConfigError
from perennial.foundation.torchvision_import import import_torchvision
from perennial.models.incremental import IncrementalModel
from perennial.models.networks import SECNN, MultilayerPerceptron, SmallCNN, SqueezeExcitation


@dataclass(frozen=True)
class _Axis:
    """One axis of a tensor that a hidden layer indexes; block: entries that each neuron owns on it."""

    key: str
    dim: int
    block: int = 1


@dataclass(frozen=True)
class _Hidden:
    """Neurons that must be renamed together. groups: of a group normalisation, which must stay whole."""

    name: str
    size: int
    groups: int
    axes: tuple[_Axis, ...]


def relabel(model: IncrementalModel, generator: np.random.Generator) -> dict[str, Tensor]:
    """Permute all hidden neurons in place; outputs change only in the order of float sums.

    Returns, by hidden layer, (size,) int64: position i now holds the neuron that was at permutation[i].
    Classes are never renamed. Channels under group normalisation move with their group.
    Raises ConfigError when the model has no known labelling.
    """
    layers = _list_hidden_layers(model)
    permutations = {layer.name: _draw(layer, generator) for layer in layers}
    _apply(model, layers, permutations)
    return permutations


def _draw(layer: _Hidden, generator: np.random.Generator) -> Tensor:
    members = np.arange(layer.size).reshape(layer.groups, -1)
    shuffled = generator.permuted(members, axis=1)[generator.permutation(layer.groups)]
    return torch.from_numpy(shuffled.reshape(-1))


@torch.no_grad()
def _apply(model: IncrementalModel, layers: list[_Hidden], permutations: Mapping[str, Tensor]) -> None:
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for layer in layers:
        for axis in layer.axes:
            tensor = tensors[axis.key]
            blocks = permutations[layer.name][:, None] * axis.block + torch.arange(axis.block)
            tensor.copy_(tensor.index_select(axis.dim, blocks.reshape(-1).to(tensor.device)))


def _list_hidden_layers(model: IncrementalModel) -> list[_Hidden]:
    backbone = model.backbone
    if type(model) is IncrementalModel:
        if isinstance(backbone, MultilayerPerceptron):
            return list(_of_perceptron(backbone))
        if isinstance(backbone, SmallCNN):
            return list(_of_chain(backbone, ["conv1", "conv2", "fc"]))
        if isinstance(backbone, SECNN):
            return list(_of_chain(backbone, ["conv1", "conv2", "conv3", "fc3", "fc4"]))
        if isinstance(backbone, import_torchvision().models.ResNet):
            return list(_of_resnet(backbone))
    raise ConfigError(
        f"relabel: found {type(model).__name__} with {type(backbone).__name__}; "
        "allowed the models mlp, small_cnn, se_cnn, resnet18, resnet34"
    )


def _of_perceptron(backbone: MultilayerPerceptron) -> Iterator[_Hidden]:
    linears = [name for name, layer in backbone.layers.named_children() if isinstance(layer, nn.Linear)]
    for name, following in zip(linears, [*linears[1:], None], strict=True):
        after = str(int(name) + 1)
        norm = backbone.layers.get_submodule(after)
        axes = [
            *_list_output_axes(f"backbone.layers.{name}"),
            *_list_channel_axes(f"backbone.layers.{after}", norm),
        ]
        axes.append(_Axis(f"backbone.layers.{following}.weight" if following else "head.weight", 1))
        yield _Hidden(
            name, _count_outputs(backbone.layers.get_submodule(name)), _count_groups(norm), tuple(axes)
        )


def _of_chain(backbone: SmallCNN | SECNN, names: list[str]) -> Iterator[_Hidden]:
    """Layers that feed one another; norms are norm1, norm2 ..., and the attention follows the first layer."""
    for number, name in enumerate(names, start=1):
        layer = backbone.get_submodule(name)
        norm = getattr(backbone, f"norm{number}", None)
        axes = [*_list_output_axes(f"backbone.{name}"), *_list_channel_axes(f"backbone.norm{number}", norm)]
        if number == 1 and backbone.attention is not None:
            axes += _list_attention_axes("backbone.attention")
            yield _build_attention_hidden("backbone.attention", backbone.attention)
        if number == len(names):
            axes.append(_Axis("head.weight", 1))
        else:
            following = backbone.get_submodule(names[number])
            block = 1
            if isinstance(layer, nn.Conv2d) and isinstance(following, nn.Linear):
                block = following.in_features // layer.out_channels
            axes.append(_Axis(f"backbone.{names[number]}.weight", 1, block))
        yield _Hidden(name, _count_outputs(layer), _count_groups(norm), tuple(axes))


def _of_resnet(backbone: nn.Module) -> Iterator[_Hidden]:
    """Each stage's residual stream is one layer, because its blocks add to it; each block has one inside."""
    stem = backbone.get_submodule("bn1")
    streams: list[tuple[str, int, nn.Module, list[_Axis]]] = []
    axes = [_Axis("backbone.conv1.weight", 0)]
    if isinstance(stem, nn.Sequential):
        stem, attention = stem
        assert isinstance(attention, SqueezeExcitation)
        axes += [
            *_list_channel_axes("backbone.bn1.norm", stem),
            *_list_attention_axes("backbone.bn1.attention"),
        ]
        yield _build_attention_hidden("backbone.bn1.attention", attention)
    else:
        axes += _list_channel_axes("backbone.bn1", stem)
    streams.append(("stem", _count_outputs(backbone.get_submodule("conv1")), stem, axes))
    for stage in ("layer1", "layer2", "layer3", "layer4"):
        for name, block in backbone.get_submodule(stage).named_children():
            prefix = f"backbone.{stage}.{name}"
            conv1, norm1, norm2 = (block.get_submodule(part) for part in ("conv1", "bn1", "bn2"))
            streams[-1][3].append(_Axis(f"{prefix}.conv1.weight", 1))
            inner = (_Axis(f"{prefix}.conv1.weight", 0), _Axis(f"{prefix}.conv2.weight", 1))
            inner += tuple(_list_channel_axes(f"{prefix}.bn1", norm1))
            yield _Hidden(f"{stage}.{name}", _count_outputs(conv1), _count_groups(norm1), inner)
            if getattr(block, "downsample", None) is not None:
                shortcut = f"{prefix}.downsample"
                streams[-1][3].append(_Axis(f"{shortcut}.0.weight", 1))
                axes = [_Axis(f"{shortcut}.0.weight", 0), *_list_channel_axes(f"{shortcut}.1", norm2)]
                streams.append((stage, _count_outputs(block.get_submodule("conv2")), norm2, axes))
            streams[-1][3].append(_Axis(f"{prefix}.conv2.weight", 0))
            streams[-1][3].extend(_list_channel_axes(f"{prefix}.bn2", norm2))
    streams[-1][3].append(_Axis("head.weight", 1))
    for name, size, norm, axes in streams:
        yield _Hidden(name, size, _count_groups(norm), tuple(axes))


def _count_outputs(layer: nn.Module) -> int:
    """Neurons or channels that a layer puts out."""
    size = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    assert isinstance(size, int)
    return size


def _list_output_axes(prefix: str) -> list[_Axis]:
    return [_Axis(f"{prefix}.weight", 0), _Axis(f"{prefix}.bias", 0)]


def _list_channel_axes(prefix: str, norm: nn.Module | None) -> list[_Axis]:
    """The float tensors of a normalisation layer; none of anything else, such as an activation."""
    if not isinstance(norm, nn.GroupNorm | nn.BatchNorm1d | nn.BatchNorm2d):
        return []
    return [
        _Axis(f"{prefix}.{name}", 0) for name, value in norm.state_dict().items() if value.is_floating_point()
    ]


def _count_groups(norm: nn.Module | None) -> int:
    return norm.num_groups if isinstance(norm, nn.GroupNorm) else 1


def _list_attention_axes(prefix: str) -> list[_Axis]:
    return [_Axis(f"{prefix}.squeeze.weight", 1), *_list_output_axes(f"{prefix}.excite")]


def _build_attention_hidden(prefix: str, attention: SqueezeExcitation) -> _Hidden:
    axes = (*_list_output_axes(f"{prefix}.squeeze"), _Axis(f"{prefix}.excite.weight", 1))
    return _Hidden("attention", attention.squeeze.out_features, 1, axes)
