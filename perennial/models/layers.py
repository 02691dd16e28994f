"""Tensors of a model that stay at a site or outlive a task: chosen by name, and grown with the classes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from math import prod, sqrt

import numpy as np
import torch
from torch import Tensor, nn

from perennial.foundation.errors import ConfigError, StateError, suggest_nearest
from perennial.foundation.streams import stream, torch_seed

STATISTICS = ".running_mean"


def select_layers(patterns: Sequence[str], keys: Iterable[str]) -> tuple[str, ...]:
    """The keys that a pattern names, in the keys' order.

    A pattern is a module ("head" stands for head.weight and head.bias), a key, or a wildcard
    ("*running_*" for the statistics of batch normalisation). Raises ConfigError when a pattern names nothing.
    """
    keys = tuple(keys)
    chosen: set[str] = set()
    for pattern in patterns:
        found = [
            key
            for key in keys
            if key == pattern or key.startswith(f"{pattern}.") or fnmatchcase(key, pattern)
        ]
        if not found:
            modules = {key.partition(".")[0] for key in keys}
            raise ConfigError(
                f"personal: {pattern!r} names no tensor of the "
                f"model{suggest_nearest(pattern, [*keys, *modules])}; "
                f"allowed: {', '.join(sorted(modules))}, a name under one of them, or a wildcard"
            )
        chosen |= set(found)
    return tuple(key for key in keys if key in chosen)


def append_rows(own: Tensor, fresh: Tensor) -> Tensor:
    """`own` with the rows of `fresh` that it lacks, as for a classifier that gains classes.

    Raises ValueError when the shapes differ in anything but the number of rows, or own has more rows.
    """
    if own.shape == fresh.shape:
        return own
    if own.dim() != fresh.dim() or own.shape[1:] != fresh.shape[1:] or len(own) > len(fresh):
        raise ValueError(f"found shape {tuple(own.shape)}, which cannot grow to {tuple(fresh.shape)}")
    return torch.cat([own, fresh[len(own) :].to(own.device)])


def grown(old: Mapping[str, Tensor], template: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`old` in the shapes of `template`, with template's values for rows and tensors that old lacks.

    Tensors that template does not name are left out. The result shares no memory with either, and lies on
    template's device. Raises StateError naming the tensor that has more rows than template, or rows of
    another shape.
    """
    result: dict[str, Tensor] = {}
    for name, fresh in template.items():
        result[name] = fresh.detach().clone()
        if name not in old:
            continue
        kept = old[name]
        fits = kept.dim() == fresh.dim() and kept.shape[1:] == fresh.shape[1:]
        if not fits or (kept.dim() > 0 and len(kept) > len(fresh)):
            raise StateError(
                f"tensor {name!r}: kept as {tuple(kept.shape)}, which cannot grow to {tuple(fresh.shape)}"
            )
        if kept.dim() == 0:
            result[name].copy_(kept)
        else:
            result[name][: len(kept)].copy_(kept)
    return result


LINEAR_SLOPE = sqrt(5)
"""The slope that torch.nn.Linear assumes: its weights lie in +-1/sqrt(fan in)."""


@contextmanager
def seed_initialisation(seed: int, *ids: int | str) -> Iterator[None]:
    """A context in which layers are initialised from the seed alone, whatever was drawn before.

    Layers of PyTorch and torchvision draw from the global CPU generator and take no other; this lends them a
    fresh one and then puts it back as it was. Build on the CPU and move the module afterwards.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(torch_seed(stream(seed, "init", *ids)))
        yield


def draw_kaiming_uniform(shape: tuple[int, ...], slope: float, generator: np.random.Generator) -> Tensor:
    """Weights uniform in +-sqrt(6 / ((1 + slope^2) fan in)), fan in being the product of shape[1:].

    slope: of the leaky ReLU that follows. Drawn in float64 and rounded once, so that every machine gets the
    same bits.

    He et al. 2015 (arXiv 1502.01852).
    """
    bound = sqrt(6 / ((1 + slope**2) * prod(shape[1:])))
    return torch.from_numpy(generator.uniform(-bound, bound, size=shape).astype(np.float32))


def empty_linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer with unset values, which draws from no generator."""
    # not by nn.utils.skip_init, whose way from the meta device imports a second's worth of compiler
    layer = nn.Linear(inputs, outputs, device="meta")
    layer.weight = nn.Parameter(torch.empty(outputs, inputs))
    layer.bias = nn.Parameter(torch.empty(outputs))
    return layer


def begin_as_shortcut(norm: nn.Module) -> None:
    """Set the scale of a residual branch's last normalisation to 0, so that its block begins as its shortcut.

    With every branch at full scale, ResNet-18 under group norms diverges at the rates of the papers' recipes.

    Args:
        norm: The branch's last normalisation layer. It is changed; nothing is drawn.

    Source: Goyal et al. 2017 (arXiv 1706.02677), section 5.1.
    """
    assert isinstance(norm.weight, Tensor)
    nn.init.zeros_(norm.weight)


@contextmanager
def explain_stale_tensors(
    owners: Iterable[object], model: Mapping[str, Tensor] | Mapping[str, torch.Size]
) -> Iterator[None]:
    """Explain an error of other people's code that kept a tensor in the shape it had before classes came.

    Args:
        owners: objects of plug-ins, whose attributes are looked through; ours are not.
        model: its tensors, or their shapes, by name.

    Raises:
        ConfigError: in place of the error, naming the class, the tensor and both shapes.
    """
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        shapes = {
            name: tuple(value.shape if isinstance(value, Tensor) else value) for name, value in model.items()
        }
        for owner in owners:
            if type(owner).__module__.startswith("perennial."):
                continue
            if found := _find_stale_tensor(owner, shapes):
                raise ConfigError(
                    f"{type(owner).__module__}:{type(owner).__qualname__}: {found}. When classes come, a "
                    "strategy grows its tensors in begin_task, a site half in open and a loss in begin "
                    f"(perennial.grown does it). The error was: {error}"
                ) from error
        raise


def _find_stale_tensor(owner: object, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """A tensor among an object's attributes that the model has outgrown, in words; '' if there is none."""
    head = max((shape for name, shape in shapes.items() if name.endswith("head.bias")), default=(0,))[0]
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    total = sum(sizes.values())
    usual = head, total, sum(size for name, size in sizes.items() if "running_" not in name)
    for attribute, value in vars(owner).items():
        for name, tensor in value.items() if isinstance(value, Mapping) else [("", value)]:
            if not isinstance(tensor, Tensor) or not tensor.dim():
                continue
            found, own = tuple(tensor.shape), shapes.get(str(name).rpartition("/")[2])
            place = f"{attribute}[{name!r}]" if isinstance(value, Mapping) else attribute
            if own is not None and found != own:
                return f"{place} has shape {found}, and this tensor of the model now has {own}"
            if own is None and len(found) == 1 and found[0] not in usual:
                floats = f", the model {total} floats" if total > head else ""
                return f"{place} has shape {found}; the head now has {head} classes{floats}"
    return ""
