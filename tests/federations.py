"""The data block that reads other data as a simulated federation's was read."""

from perennial.data.config import DataConfig, NormaliseConfig
from perennial.data.federation import SimulatedFederation
from perennial.data.sources import load
from perennial.data.table_columns import locate_numbers


def resolved(federation: SimulatedFederation, config: DataConfig) -> DataConfig:
    """config with everything that was discovered written out, so that other data is read the same way."""
    mean, std = federation.mean.tolist(), federation.std.tolist()
    normalise: dict[str, object] = {"mean": mean, "std": std}
    found: dict[str, object] = {"classes": load(config, 0).classes}
    if federation.columns is not None:
        indices = locate_numbers(federation.columns)
        normalise = {
            key: {name: values[place] for name, place in indices.items()}
            for key, values in (("mean", mean), ("std", std))
        }
        found |= {"columns": federation.columns, "column_kinds": {}}
        if federation.fill is not None:
            values = federation.fill.tolist()
            found["imputation"] = {name: values[place] for name, place in indices.items()}
    elif config.source == "folder":
        found |= {"image_size": federation.input_shape[1:], "color": config.color or "rgb"}
    if config.normalise is None:
        found["normalise"] = NormaliseConfig.model_validate(normalise)
    return DataConfig.model_validate({**dict(config), **found})
