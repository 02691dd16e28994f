"""Reads the data that an experiment or a site names, of whichever kind they are."""

from pathlib import Path

import torch
from torch import Tensor

from perennial.data.config import SOURCES, DataConfig, find_kind
from perennial.data.samples import Source, select_classes
from perennial.foundation import keywords, plugins
from perennial.foundation.errors import ConfigError, DataError


def load(config: DataConfig, seed: int, cache: Path | None = None) -> Source:
    """Samples, class names and constants of a data block, in a deterministic order.

    seed: for data that is generated. cache: a private folder in which decoded images may be kept.
    Raises DataError or ConfigError naming the file, row, label or key that is wrong.
    """
    kind = find_kind(config.source)
    if kind.collected and config.path is None:
        raise DataError(
            "data.path: missing; this experiment has no data of its own, only deployed sites have"
        )
    if config.source not in SOURCES:
        reader = plugins.load("source", config.source, "data.source")
        source = keywords.build(reader, config.source, config.options, "data.options", first=(config, seed))
        if not isinstance(source, Source):
            raise ConfigError(f"data.source: {config.source} gave {type(source).__name__}, allowed a Source")
        _require_whole(source, f"data.source: {config.source}")
        return select_classes(source, config.classes)
    reader, offered = plugins.load_ours(kind.reader), {"seed": seed, "cache": cache}
    source = reader(config, **{name: offered[name] for name in kind.takes})
    return source if kind.collected else select_classes(source, config.classes)


def _require_whole(source: Source, where: str) -> None:
    """Raises ConfigError naming what somebody's own source got wrong, before samples are lost by it."""
    for part in (source.train, *([] if source.test is None else [source.test])):
        x, y = part.x, part.y
        if not isinstance(x, Tensor) or x.dtype not in (torch.uint8, torch.float32) or not x.numel():
            found = f"{x.dtype} of shape {tuple(x.shape)}" if hasattr(x, "dtype") else type(x).__name__
            raise ConfigError(f"{where}: x: found {found}, allowed a uint8 or float32 tensor of samples")
        if not isinstance(y, Tensor) or y.dtype != torch.int64 or y.shape != x.shape[:1]:
            found = f"{y.dtype} of shape {tuple(y.shape)}" if hasattr(y, "dtype") else type(y).__name__
            raise ConfigError(f"{where}: y: found {found}, allowed an int64 tensor of shape ({len(x)},)")
        if int(y.min()) < 0 or int(y.max()) >= len(source.classes):
            raise ConfigError(f"{where}: y: found {int(y.max())}, allowed 0 to {len(source.classes) - 1}")
        for name in ("mean", "std"):
            found = getattr(source, name)
            if not isinstance(found, Tensor) or found.shape != x.shape[1:2]:
                raise ConfigError(f"{where}: {name}: found {found!r:.80}, allowed ({x.shape[1]},) float32")
