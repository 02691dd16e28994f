"""A deployed site: loads its own data and divides them into training, validation and test samples.

Given the key of a simulation and the samples that one of its natural sites has, its parts are the same.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from perennial.data.config import DataConfig
from perennial.data.csv_file import require_rows_apart
from perennial.data.labels import list_empty_classes
from perennial.data.samples import Samples, choose_constants, fill_missing, join_samples
from perennial.data.site import SiteData
from perennial.data.sources import load
from perennial.data.splits import KeyedHash, record_contents
from perennial.data.table import build_table_constants, build_table_fill
from perennial.data.table_columns import count_features
from perennial.data.tasks_config import PartitionConfig
from perennial.foundation.errors import ConfigError, DataError, suggest_nearest

SITE_KEYS = (
    "source",
    "path",
    "dataset",
    "download",
    "labels",
    "label_column",
    "site_column",
    "arrays",
    "patient",
)
"""What a site says about its own data; everything else is the experiment's to say."""
SITE_MAY = ("missing", "decimal", "units", "limits", "window", "unreadable")
"""What a site may say, and else takes from the experiment."""


def merge_site_config(experiment: DataConfig, site: DataConfig) -> DataConfig:
    """The data block of one site: how its data is read as the site says, the rest as the experiment says.

    Raises ConfigError if the site's block sets what the experiment decides, or if the two do not fit.
    """
    for key in sorted(site.model_fields_set - {*SITE_KEYS, *SITE_MAY}):
        if getattr(site, key) not in (type(site).model_fields[key].get_default(), getattr(experiment, key)):
            raise ConfigError(
                f"data.{key}: found {getattr(site, key)!r} in the site's file, but the experiment "
                f"decides it; a site may say {', '.join((*SITE_KEYS, *SITE_MAY))}"
            )
    merged = dict(experiment) | {key: getattr(site, key) for key in SITE_KEYS}
    merged |= {key: getattr(site, key) for key in SITE_MAY if key in site.model_fields_set}
    merged |= {"partition": PartitionConfig(), "sites": None}
    try:
        return DataConfig.model_validate(merged)
    except ValidationError as error:
        reasons = "; ".join(str(fault["msg"]) for fault in error.errors())
        raise ConfigError(f"data: the site's file and the experiment do not fit: {reasons}") from error


def load_site(
    config: DataConfig,
    registry: Sequence[str],
    site_name: str,
    seed: int,
    key: bytes,
    cache: Path | None = None,
    protected: bool = False,
) -> SiteData:
    """The samples of one site and its parts.

    config: as site_config makes it. registry: class names in class order. Where the data says who holds each
    sample, only those of site_name count. seed: for data that is generated. key: of the run, by which every
    record's part is decided. cache: a private folder for decoded images, or None. protected: whether no
    record may decide how another one is read, or which part it is in: then the experiment's test fraction is
    held out also where the data have a test part of their own.
    Raises ConfigError or DataError naming the key, file, row or label that is wrong.
    """
    if config.source == "csv" and config.columns is None:
        raise ConfigError(
            "data.columns: missing; sites that discovered columns for themselves would disagree"
        )
    table = None if config.path is None else Path(config.path).expanduser()
    if protected and table is not None and (config.source == "csv" or table.suffix.lower() == ".csv"):
        require_rows_apart(table, config.decimal)
    whole = {"classes": tuple(registry), "partition": PartitionConfig(), "sites": None}
    alone = config.model_copy(update=whole)
    source = load(alone, seed, cache)
    if source.mean.isnan().any():
        raise ConfigError("data.normalise: missing; a site alone cannot know what all sites standardise by")
    if source.fill is not None and source.fill.isnan().any():
        raise ConfigError(
            "data.imputation: found 'median', which no site alone can know for all; give a number for each "
            "column, or mean, which takes data.normalise"
        )
    held = [_select_rows(source.train, site_name)]
    train = source.train.pick(held[0]) if source.train.site is not None else source.train
    if len(train) == 0:
        raise DataError(f"site {site_name!r}: no sample in {config.path}")
    parts = [train]
    if source.test is not None:
        held.append(_select_rows(source.test, site_name))
        parts.append(source.test.pick(held[1]) if source.test.site is not None else source.test)
    everything = join_samples(*parts) if len(parts) > 1 else train
    x, y = everything.x, everything.y
    keyed = KeyedHash(key, everything.split_groups())
    contents = record_contents(x, source.columns)
    fill_missing(x, source.mean if source.fill is None else source.fill)
    rows = np.arange(len(y))
    rest, test = np.split(rows, [len(train)])
    if protected or len(parts) == 1:
        held_out, rest = keyed.hold_out(rest, config.test_fraction, "test")
        test = np.sort(np.concatenate([held_out, test]))
    validation, rest = keyed.hold_out(rest, config.validation_fraction, "validation")
    calibration, rest = keyed.hold_out(rest, config.calibration_fraction, "calibration")
    notes = list(source.notes)
    absent = list_empty_classes(y.numpy(), registry)
    if absent:
        notes.append(f"site {site_name!r} holds no sample of {', '.join(absent)}")
    for part, places, wanted in (
        ("training", rest, True),
        ("validation", validation, config.validation_fraction > 0),
        ("test", test, config.test_fraction > 0),
    ):
        lacking = [name for name in list_empty_classes(y.numpy()[places], registry) if name not in absent]
        if wanted and lacking:
            notes.append(
                f"site {site_name!r} has no {part} sample of {', '.join(lacking)}: a hash of each record "
                "decides, whatever its class"
            )
    if config.samples_limit is not None or config.test_limit is not None:
        notes.append(
            "data.samples_limit and test_limit are for simulation; this site uses all of its samples"
        )
    return SiteData(
        site_name,
        x,
        y,
        train=torch.from_numpy(rest),
        validation=torch.from_numpy(validation),
        test=torch.from_numpy(test),
        mean=source.mean,
        std=source.std,
        keyed=keyed,
        columns=source.columns,
        notes=tuple(notes),
        patients=source.train.patients,
        fill=source.fill,
        calibration=torch.from_numpy(calibration),
        subgroup=everything.subgroup,
        contents=contents,
        places=tuple(
            f"{config.path}: {part.keys[place]}" if part.keys is not None else f"{config.path}: {role} {row}"
            for role, part, rows in zip(("train", "test"), parts, held, strict=False)
            for place, row in enumerate(rows.tolist())
        ),
    )


def derive_input_shape(config: DataConfig) -> tuple[int, ...]:
    """(C, H, W) or (D,) of the inputs by an experiment's keys alone. Raises ConfigError for a missing key."""
    if config.source == "csv":
        if config.columns is None:
            raise ConfigError(
                "data.columns: missing; an experiment without data of its own must list the features"
            )
        return (count_features(config.columns),)
    if config.size is None:
        raise ConfigError("data.image_size: missing; an experiment without data of its own must say it")
    return (1 if config.color == "gray" else 3, *config.size)


def derive_constants(config: DataConfig) -> tuple[Tensor, Tensor]:
    """(mean, std) of (x - mean) / std, by an experiment's own keys without any data, equal at all sites."""
    if config.source == "csv":
        return build_table_constants(config, config.columns or {})
    channels, *_ = derive_input_shape(config)
    return choose_constants(config.normalise, torch.empty((0, channels), dtype=torch.uint8))


def derive_fill(config: DataConfig) -> Tensor | None:
    """(D,) values for missing numbers, by the experiment's keys alone; None: the mean, or no table."""
    return build_table_fill(config, config.columns or {}) if config.source == "csv" else None


def _select_rows(samples: Samples, site_name: str) -> Tensor:
    """(n,) int64: the rows that the data says this site holds; all where it names nobody."""
    if samples.site is None:
        return torch.arange(len(samples))
    if site_name not in samples.site_names:
        hint = suggest_nearest(site_name, samples.site_names)
        raise DataError(
            f"site {site_name!r}: the data names other sites only{hint}: {', '.join(samples.site_names)}"
        )
    return torch.nonzero(samples.site == samples.site_names.index(site_name)).squeeze(1)
