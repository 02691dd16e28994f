"""Tables: CSV files with columns of numbers, dates and categories, missing values and a label column."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perennial.data.config import DataConfig, describe_skipped
from perennial.data.csv_file import CsvFile, read_csv
from perennial.data.labels import encode_labels
from perennial.data.samples import Samples, Source, find_subgroups
from perennial.data.splits import group_by_patient, group_by_text
from perennial.data.table_columns import (
    MISSING,
    BadCells,
    Columns,
    count_features,
    describe_groups,
    discover,
    encode,
    locate_numbers,
)
from perennial.foundation.errors import ConfigError, DataError, suggest_nearest


def load_table(config: DataConfig) -> Source:
    """Read a CSV file as a float32 matrix (N, D), laid out as table_columns.encode says.

    Raises DataError naming the file, and the line if there is one.
    """
    file = read_table(config)
    texts = file.columns
    named = (config.label_column, config.site_column, config.patient)
    apart = config.subgroup.column if config.subgroup is not None else None
    for name in filter(None, (*named, apart, *config.column_kinds)):
        if name not in texts:
            raise DataError(
                f"{file.path}: no column {name!r}{suggest_nearest(name, texts)}; found {', '.join(texts)}"
            )
    y, classes = encode_labels(
        texts[config.label_column], config.classes, config.labels, file.where, (*MISSING, *config.missing)
    )
    features = [name for name in texts if name not in named]
    columns: Columns = (
        dict(config.columns)
        if config.columns is not None
        else discover(file, features, config.column_kinds, config.missing)
    )
    bad = BadCells(file)
    x = torch.from_numpy(encode(file, columns, config.missing, bad))
    note = describe_skipped(config.unreadable, len(bad.rows), len(y), f"{file.path}: rows with cells that")
    if note is None:
        bad.refuse()
    site, site_names = _number_sites(file, config.site_column)
    if config.patient is None:
        groups = _group_rows(texts, columns)
    else:
        groups = group_by_patient(
            texts[config.patient].tolist(),
            lambda row: f"{file.where(row)}, {config.patient}",
            (*MISSING, *config.missing),
        )
    patients = config.patient is not None
    subgroup = None if apart is None else find_subgroups(texts[apart].tolist(), config)
    samples = Samples(
        x, torch.from_numpy(y), site, site_names, groups=groups, patients=patients, subgroup=subgroup
    )
    notes = [*file.notes, *_describe_columns(columns, config)]
    if bad.named:
        notes.append(f"{note}, taken as missing values: {'; '.join(bad.named[:3])}")
    return Source(
        samples,
        None,
        classes,
        *build_table_constants(config, columns),
        columns=columns,
        fill=build_table_fill(config, columns),
        notes=tuple(notes),
    )


def read_table(config: DataConfig, path: Path | None = None) -> CsvFile:
    """The cells of a data block's table, or of another file by the same settings.

    Raises DataError as read_csv does.
    """
    if path is None:
        assert config.path is not None
        path = Path(config.path).expanduser()
    return read_csv(path, config.decimal, config.units, config.limits)


def _number_sites(file: CsvFile, column: str | None) -> tuple[Tensor | None, tuple[str, ...]]:
    if column is None:
        return None, ()
    names, index = np.unique(file.columns[column], return_inverse=True)
    if names[0] == "":
        raise DataError(f"{file.where(int(np.argmin(index)))}: the {column} is empty")
    return torch.from_numpy(index.astype(np.int64)), tuple(names.tolist())


def _group_rows(texts: Mapping[str, np.ndarray], columns: Mapping[str, object]) -> np.ndarray:
    """Of each row, from the texts of its features: how they are encoded can depend on other rows."""
    names = sorted(columns)
    rows = zip(*(texts[name].tolist() for name in names), strict=True)
    return group_by_text("content", [json.dumps([names, row]) for row in rows])


def _describe_columns(columns: Columns, config: DataConfig) -> list[str]:
    found = [name for name, kind in columns.items() if kind == "date" and config.columns is None]
    notes = [
        f"column {name!r} has {said}" for name, kind in columns.items() if (said := describe_groups(kind))
    ]
    return notes + [
        f"column {name!r} holds dates and is read as days since 1970; if it says when a record was made and "
        "nothing of the patient, leave it out with data.column_kinds: ignore"
        for name in found
    ]


def _assign_by_column(
    values: Tensor, named: Mapping[str, float], indices: Mapping[str, int], key: str
) -> None:
    """Write each named column's number to its index in values. Raises ConfigError if the names differ."""
    for name in named:
        if name not in indices:
            raise ConfigError(f"data.{key}: {name!r} is no numeric column{suggest_nearest(name, indices)}")
    for name, index in indices.items():
        if name not in named:
            raise ConfigError(f"data.{key}: the numeric column {name!r} is missing")
        values[index] = named[name]


def build_table_constants(
    config: DataConfig, columns: Mapping[str, str | Sequence[str]]
) -> tuple[Tensor, Tensor]:
    """(mean, std), each (D,), that standardise an encoded table.

    columns: feature column -> "numeric", "date" or its categories. Numbers and dates take data.normalise, NaN
    without it: the training rows decide; indicators and one-hot codes take 0 and 1.
    """
    mean, std = torch.zeros(count_features(columns)), torch.ones(count_features(columns))
    indices = locate_numbers(columns)
    constants = config.normalise
    for values, chosen in ((mean, constants and constants.mean), (std, constants and constants.std)):
        named = chosen if isinstance(chosen, dict) else dict.fromkeys(indices, float("nan"))
        _assign_by_column(values, named, indices, "normalise")
    return mean, std


def build_table_fill(config: DataConfig, columns: Mapping[str, str | Sequence[str]]) -> Tensor | None:
    """(D,) values for missing numbers and dates; NaN: the training rows' median; None: their mean."""
    rule = config.imputation
    if rule == "mean":
        return None
    fill = torch.zeros(count_features(columns))
    indices = locate_numbers(columns)
    if isinstance(rule, dict):
        named = rule
    else:
        named = dict.fromkeys(indices, float("nan") if rule == "median" else float(rule))
    _assign_by_column(fill, named, indices, "imputation")
    return fill
