"""Runs K networks as one: the same layers with the weights of K sites, in one pass.

Dimension 1 of every activation holds the sites one after the other, (B, K * C, ...), so that elementwise
layers, pooling and flatten(1) are right as they are. A convolution has K groups, a linear layer is one
product of K matrices, a group norm has K times the groups. Modules without a trained parameter are shared:
they see (B * K, C, ...), in which row b * K + k is sample b of site k.

K: sites. B: samples of each site, shorter batches filled up. M: classes.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perennial.foundation.errors import ConfigError
from perennial.models.flat import FlatParameters
from perennial.models.incremental import IncrementalModel


class StackedParameters:
    """Weights and gradients of K sites.

    vector, gradient: (K * T,). leaves: by name, views of vector that autograd accumulates into gradient:
    (K * rows, ...) unless keep_apart gave (K, ...). sizes: of the sites' batches in this step, and
    generators: for what is drawn in it; both are for dropout.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], count: int, like: Tensor) -> None:
        """Zeros for `count` sites. shapes: one site's parameters, in order. like: gives type and device."""
        self.count = count
        self.leaves: dict[str, Tensor] = {}
        self.sizes: Sequence[int] = ()
        self.generators: Sequence[torch.Generator] = ()
        self._lengths = [shape.numel() for shape in shapes.values()]
        self._shapes = {name: (1, tuple(shape)) for name, shape in shapes.items()}
        self.vector = like.new_zeros(count * self.length)
        self.gradient = torch.zeros_like(self.vector)
        self._whole = count, self.vector, self.gradient

    @property
    def length(self) -> int:
        """T, the number of values of one site."""
        return sum(self._lengths)

    def keep_apart(self, name: str, shape: tuple[int, ...]) -> None:
        """Give a leaf the shape (K, *shape), from the next settle() on."""
        self._shapes[name] = (0, shape)

    def settle(self) -> None:
        """Make the leaves views of the present vector and gradient."""
        weights, gradients = self.blocks(self.vector), self.blocks(self.gradient)
        for (name, (merged, shape)), weight, gradient in zip(
            self._shapes.items(), weights, gradients, strict=True
        ):
            whole = (self.count * shape[0], *shape[1:]) if merged else (self.count, *shape)
            leaf = weight.view(whole).requires_grad_()
            leaf.grad = gradient.view(whole)
            self.leaves[name] = leaf

    def begin_again(self) -> None:
        """Hold all sites again, in the same memory, with zero gradient."""
        self.count, self.vector, self.gradient = self._whole
        self.gradient.zero_()
        self.sizes = self.generators = ()
        self.settle()

    def blocks(self, vector: Tensor) -> list[Tensor]:
        """Split vector (K * T,) into one (K, n) view for each tensor."""
        parts = vector.split([self.count * length for length in self._lengths])
        return [part.view(self.count, -1) for part in parts]

    def gathered(self, rows: Tensor) -> Tensor:
        """Reorder sites' vectors (K, T) as this vector is ordered: (K * T,), tensor by tensor."""
        return torch.cat([part.reshape(-1) for part in rows.split(self._lengths, dim=1)])

    def rows(self, vector: Tensor) -> Tensor:
        """Reorder vector (K * T,) as one vector for each site: (K, T), a copy."""
        return torch.cat(self.blocks(vector), dim=1)

    def load(self, rows: Tensor) -> None:
        """Copy the sites' vectors, (K, T), into this vector."""
        self.vector.copy_(self.gathered(rows))

    def keep(self, count: int, beside: Sequence[Tensor]) -> list[Tensor]:
        """Drop all but the first `count` sites, and return their part of other vectors (K * T,)."""

        def take_first(vector: Tensor) -> Tensor:
            return torch.cat([block[:count].reshape(-1) for block in self.blocks(vector)])

        self.vector, self.gradient, *others = [
            take_first(each) for each in (self.vector, self.gradient, *beside)
        ]
        self.count = count
        self.generators = self.generators[:count]
        self.settle()
        return others

    def block(self, name: str, vector: Tensor) -> Tensor:
        """The (K, n) view of vector (K * T,) that holds one tensor."""
        return self.blocks(vector)[list(self._shapes).index(name)]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Join kinds of features (B, K * d_i) to (B, K * sum d_i), each site's own side by side."""
        batch = len(parts[0])
        return torch.cat([part.view(batch, self.count, -1) for part in parts], dim=2).view(batch, -1)


WITHOUT_PARAMETERS = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh),
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
)
"""Layers that treat every channel alike."""


class StackedLinear(nn.Module):
    """(B, K * in) -> (B, K * out)."""

    def __init__(self, layer: nn.Linear, name: str, sites: StackedParameters) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._sites, self._weight = sites, f"{name}.weight"
        self._bias = None if layer.bias is None else f"{name}.bias"
        sites.keep_apart(self._weight, tuple(layer.weight.shape))
        if self._bias is not None:
            sites.keep_apart(self._bias, (1, layer.out_features))

    def forward(self, x: Tensor) -> Tensor:
        leaves, batch = self._sites.leaves, x.shape[0]
        x = x.reshape(batch, self._sites.count, self.in_features).transpose(0, 1)
        weight = leaves[self._weight].transpose(1, 2)
        y = torch.bmm(x, weight) if self._bias is None else torch.baddbmm(leaves[self._bias], x, weight)
        return y.transpose(0, 1).reshape(batch, -1)


class StackedConv2d(nn.Module):
    """(B, K * C, H, W) -> (B, K * O, H', W'), as a convolution of K groups."""

    def __init__(self, layer: nn.Conv2d, name: str, sites: StackedParameters) -> None:
        super().__init__()
        if layer.padding_mode != "zeros":
            raise ConfigError(f"{name}: a convolution with {layer.padding_mode} padding")
        self._layer = {key: getattr(layer, key) for key in ("stride", "padding", "dilation")}
        self._groups = layer.groups
        self._sites, self._weight = sites, f"{name}.weight"
        self._bias = None if layer.bias is None else f"{name}.bias"

    def forward(self, x: Tensor) -> Tensor:
        leaves = self._sites.leaves
        bias = None if self._bias is None else leaves[self._bias]
        groups = self._sites.count * self._groups
        return F.conv2d(x, leaves[self._weight], bias, **self._layer, groups=groups)


class StackedGroupNorm(nn.Module):
    """(B, K * C, ...) -> the same; each site's groups are its own."""

    def __init__(self, layer: nn.GroupNorm, name: str, sites: StackedParameters) -> None:
        super().__init__()
        self._groups, self._eps, self._sites, self._name = layer.num_groups, layer.eps, sites, name

    def forward(self, x: Tensor) -> Tensor:
        leaves, name = self._sites.leaves, self._name
        groups = self._sites.count * self._groups
        return F.group_norm(x, groups, leaves[f"{name}.weight"], leaves[f"{name}.bias"], self._eps)


class StackedDropout(nn.Module):
    """Each site's mask comes from its own generator, as long as its own batch."""

    def __init__(self, share: float, sites: StackedParameters) -> None:
        super().__init__()
        self._kept, self._sites = 1.0 - share, sites

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        sites, shape = self._sites, (x.shape[1] // self._sites.count, *x.shape[2:])
        masks = [
            x.new_empty((size, *shape)).bernoulli_(self._kept, generator=generator)
            for size, generator in zip(sites.sizes, sites.generators, strict=True)
        ]
        mask = nn.utils.rnn.pad_sequence(masks).view(x.shape)
        return x * mask.div_(self._kept)


class Shared(nn.Module):
    """A module without trained parameters, the same for all sites."""

    def __init__(self, module: nn.Module, sites: StackedParameters) -> None:
        super().__init__()
        self.module, self._sites = module, sites

    def forward(self, x: Tensor) -> Tensor:
        batch, count = x.shape[0], self._sites.count
        y = self.module(x.reshape(batch * count, x.shape[1] // count, *x.shape[2:]))
        return y.reshape(batch, count * y.shape[1], *y.shape[2:])


STACKED: dict[type[nn.Module], Callable[[Any, str, StackedParameters], nn.Module]] = {
    nn.Linear: StackedLinear,
    nn.Conv2d: StackedConv2d,
    nn.GroupNorm: StackedGroupNorm,
}


def stack(
    model: IncrementalModel, flat: FlatParameters, count: int
) -> tuple[IncrementalModel, StackedParameters]:
    """(a model for `count` sites, their weights in one vector); the caller fills the weights.

    The stacked model computes with these weights: loading others, or keeping fewer sites, changes what it
    computes. For a small model, a later call with the same count returns the same objects, with their
    gradient set to zero. model: of one site, whose parameters flat holds.
    Raises ConfigError naming the layer that has no stacked form.
    """
    if count in flat.stacks:
        network, sites = flat.stacks[count]
        sites.begin_again()
        return network, sites
    if flat.trainable_keys != flat.keys:
        buffer = next(key for key in flat.keys if key not in flat.trainable_keys)
        raise ConfigError(f"{buffer}: statistics of the data, which sites cannot share")
    sites = StackedParameters(flat.shapes, count, flat.vector)
    network = _stack_module(model, "", sites)
    assert isinstance(network, IncrementalModel)
    sites.settle()
    if not flat.large:
        flat.stacks[count] = network, sites
    return network, sites


@torch.no_grad()
def check_stacked(model: IncrementalModel, input_shape: tuple[int, ...]) -> None:
    """Raise ConfigError unless a stacked model gives the same answers as the model itself.

    Layers decide whether there is a form; whether code between them mixes sites shows in the answers alone,
    or in shapes that do not fit. The model's values change: a 0, which would hide its layer, becomes a draw.
    """
    flat = FlatParameters(model.eval())
    network, sites = stack(model, flat, 2)
    draw = torch.Generator().manual_seed(0)
    drawn = torch.randn(flat.vector.shape, generator=draw).to(flat.vector)
    vector = torch.where(flat.vector == 0, 0.1 * drawn, flat.vector)
    rows = torch.stack([vector, 1.25 * vector])
    sites.load(rows)
    inputs = [torch.rand((3, *input_shape), generator=draw).to(flat.vector) for _ in rows]
    try:
        found = as_rows(network.eval()(join_batches(inputs)), 2)
    except RuntimeError as error:
        raise ConfigError(f"its code between layers fits one site alone: {error}") from error
    for site, (row, x) in enumerate(zip(rows, inputs, strict=True)):
        flat.vector.copy_(row)
        expected = model(x)
        if not torch.allclose(found[site::2], expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())):
            raise ConfigError("what it computes for two sites is not what it computes for each")


@torch.no_grad()
def measure_largest_activation(model: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Number of elements of the largest output of any layer, for one sample."""
    found = [0]
    leaves = [module for module in model.modules() if not any(True for _ in module.children())]
    hooks = [
        module.register_forward_hook(lambda _, __, output: found.append(output.numel())) for module in leaves
    ]
    try:
        model.eval()(torch.zeros((1, *input_shape)))
    finally:
        for hook in hooks:
            hook.remove()
    return max(found)


def _stack_module(module: nn.Module, name: str, sites: StackedParameters) -> nn.Module:
    if type(module) in STACKED and next(module.parameters()).requires_grad:
        return STACKED[type(module)](module, name, sites)
    if isinstance(module, nn.Dropout):
        return StackedDropout(module.p, sites) if module.p else nn.Identity()
    flattens = isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1)
    if flattens or isinstance(module, WITHOUT_PARAMETERS):
        return copy.copy(module)
    inner = name == "" or any(value.requires_grad for value in module.parameters())
    if not inner:
        _refuse_batch_statistics(module, name)
        return Shared(module, sites)
    if any(True for _ in module.parameters(recurse=False)):
        raise ConfigError(f"{name}: {type(module).__name__} has no form for several sites")
    clone = copy.copy(module)
    children = {
        key: child if child is None else _stack_module(child, f"{name}.{key}".lstrip("."), sites)
        for key, child in vars(module)["_modules"].items()
    }
    vars(clone)["_modules"] = children
    if hasattr(clone, "join"):
        vars(clone)["join"] = sites.joined
    return clone


def _refuse_batch_statistics(module: nn.Module, name: str) -> None:
    for key, part in module.named_modules(prefix=name):
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training:
            raise ConfigError(f"{key}: {type(part).__name__} mixes the samples of a batch")


def as_rows(x: Tensor, count: int) -> Tensor:
    """Reshape (B, K * C, ...) to (B * K, C, ...)."""
    return x.view(len(x) * count, x.shape[1] // count, *x.shape[2:])


def join_batches(batches: Sequence[Tensor]) -> Tensor:
    """Join K batches (B_k, C, ...) to one (B, K * C, ...), the shorter ones filled up with zeros."""
    x = nn.utils.rnn.pad_sequence(list(batches))
    return x.reshape(x.shape[0], -1, *x.shape[3:])
