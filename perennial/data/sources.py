"""Reads the data that an experiment or a site names, of whichever kind they are."""

from pathlib import Path

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
        return select_classes(source, config.classes)
    reader, offered = plugins.load_ours(kind.reader), {"seed": seed, "cache": cache}
    source = reader(config, **{name: offered[name] for name in kind.takes})
    return source if kind.collected else select_classes(source, config.classes)
