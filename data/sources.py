"""The one door to every kind of data: reads what an experiment or a site names."""

from pathlib import Path

from perennial.data.config import DataConfig
from perennial.data.samples import Source, select_classes
from perennial.foundation.errors import DataError


def load(config: DataConfig, seed: int, cache: Path | None = None) -> Source:
    """Samples, class names and constants of a data block, in a deterministic order.

    seed: for data that is generated. cache: a private folder in which decoded images may be kept.
    Raises DataError or ConfigError naming the file, row, label or key that is wrong.
    """
    match config.source:
        case "folder" | "csv" | "npz":
            return _own_data(config, cache)
        case "digits" | "pack" | "torchvision" | "synth_groups":
            return select_classes(_benchmark(config, seed), config.classes)


def _own_data(config: DataConfig, cache: Path | None) -> Source:
    """Data that somebody collected: a class outside the registry is a mistake."""
    if config.path is None:
        raise DataError(
            "data.path: missing; this experiment has no data of its own, only deployed sites have"
        )
    if config.source == "folder":
        from perennial.data.folder import load_folder

        return load_folder(config, cache)
    if config.source == "csv":
        from perennial.data.table import load_table

        return load_table(config)
    from perennial.data.npz import load_npz

    return load_npz(config)


def _benchmark(config: DataConfig, seed: int) -> Source:
    """Data whose classes are known: an experiment may use some of them."""
    if config.source == "digits":
        from perennial.data.digits import load_digits

        return load_digits(config)
    if config.source == "pack":
        from perennial.data.pack import load_pack

        return load_pack(config)
    if config.source == "torchvision":
        from perennial.data.torchvision_source import load_torchvision

        return load_torchvision(config)
    from perennial.data.synth_groups import load_synth_groups

    return load_synth_groups(config, seed)
