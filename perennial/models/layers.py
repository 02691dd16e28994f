"""Tensors of a model that stay at a site or outlive a task: chosen by name, and grown with the classes."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from perennial.foundation.errors import ConfigError, StateError, nearest

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
                f"personal: {pattern!r} names no tensor of the model{nearest(pattern, [*keys, *modules])}; "
                f"allowed: {', '.join(sorted(modules))}, a name under one of them, or a wildcard"
            )
        chosen |= set(found)
    return tuple(key for key in keys if key in chosen)


def with_rows(own: Tensor, fresh: Tensor) -> Tensor:
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
