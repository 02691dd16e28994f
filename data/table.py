"""Tables: CSV files with numeric and categorical columns, missing values and a label column."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from perennial.data.config import DataConfig
from perennial.data.labels import encode_labels
from perennial.data.samples import Samples, Source
from perennial.data.splits import patient_groups, text_groups
from perennial.foundation.errors import ConfigError, DataError, nearest

MISSING = ("", "NA", "N/A", "na", "n/a", "NaN", "nan", "NULL", "null", "None", "?")
MOST_CATEGORIES = 100
"""A discovered column with more distinct texts than this is an identifier or free text, not a category."""

Columns = dict[str, str | tuple[str, ...]]


def load_table(config: DataConfig) -> Source:
    """Read a CSV file as a float32 matrix (N, D).

    Each numeric column gives its value (NaN if missing) and a 0/1 indicator of missing values. Each
    categorical column gives its one-hot code, whose last entry stands for unknown or missing.

    Raises DataError naming the file, and the line if there is one.
    """
    assert config.path is not None
    path = Path(config.path).expanduser()
    texts, lines = read_columns(path)
    for name in filter(None, (config.label_column, config.site_column, config.patient)):
        if name not in texts:
            raise DataError(f"{path}: no column {name!r}{nearest(name, texts)}; found {', '.join(texts)}")
    y, classes = encode_labels(
        texts[config.label_column],
        config.classes,
        config.labels,
        lambda row: f"{path}, line {lines[row]}",
        MISSING,
    )
    apart = {config.label_column, config.site_column, config.patient}
    columns = config.columns or _discover({name: c for name, c in texts.items() if name not in apart}, path)
    site, site_names = None, ()
    if config.site_column is not None:
        names, index = np.unique(texts[config.site_column], return_inverse=True)
        if names[0] == "":
            raise DataError(f"{path}, line {lines[int(np.argmin(index))]}: the {config.site_column} is empty")
        site, site_names = torch.from_numpy(index.astype(np.int64)), tuple(names.tolist())
    x = torch.from_numpy(encode(texts, columns, path, lines))
    if config.patient is None:
        groups = _groups(texts, columns)
    else:
        groups = patient_groups(
            texts[config.patient].tolist(), lambda row: f"{path}, line {lines[row]}, {config.patient}"
        )
    patients = config.patient is not None
    samples = Samples(x, torch.from_numpy(y), site, site_names, groups=groups, patients=patients)
    return Source(samples, None, classes, *table_constants(config, columns), columns=dict(columns))


def _groups(texts: Mapping[str, np.ndarray], columns: Mapping[str, object]) -> np.ndarray:
    """Of each row, from the texts of its features: how they are encoded can depend on other rows."""
    names = sorted(columns)
    rows = zip(*(texts[name].tolist() for name in names), strict=True)
    return text_groups("content", [json.dumps([names, row]) for row in rows])


def read_columns(path: Path) -> tuple[dict[str, np.ndarray], list[int]]:
    """(column name -> (N,) texts (StringDType) without surrounding space, line of each row in the file).

    The separator is the comma, semicolon or tab that the header has most of.
    Raises DataError naming the file and line where it is no table.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=max(",;\t", key=header.count), skipinitialspace=True)
            names = [name.strip() for name in next(reader, [])]
            numbered = [(reader.line_num, row) for row in reader if row]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a CSV file in UTF-8 ({error})") from error
    if not numbered:
        raise DataError(f"{path}: the table has no row")
    if "" in names or len(set(names)) != len(names):
        raise DataError(
            f"{path}: the header must name every column once; found {', '.join(map(repr, names))}"
        )
    for line, row in numbered:
        if len(row) != len(names):
            raise DataError(f"{path}, line {line}: {len(row)} values for {len(names)} columns")
    lines, rows = zip(*numbered, strict=True)
    columns = {
        # not as wide as the longest text: one long cell would make every row take its width
        name: np.strings.strip(np.array(values, dtype=np.dtypes.StringDType()))
        for name, values in zip(names, zip(*rows, strict=True), strict=True)
    }
    return columns, list(lines)


def encode(
    texts: Mapping[str, np.ndarray],
    columns: Mapping[str, str | Sequence[str]],
    path: Path,
    lines: Sequence[int],
) -> np.ndarray:
    """(N, D) float32 of texts, laid out as load_table says; path and lines are for error messages."""
    parts = []
    for name, kind in columns.items():
        if name not in texts:
            raise DataError(f"{path}: no column {name!r}{nearest(name, texts)}; data.columns lists it")
        if isinstance(kind, str):
            values = _numbers(texts[name], f"{path}, column {name!r}", lines)
            parts += [values[:, None], np.isnan(values)[:, None]]
        else:
            known = texts[name][:, None] == np.array(kind)[None, :]
            parts += [known, ~known.any(axis=1, keepdims=True)]
    return np.concatenate(parts, axis=1, dtype=np.float32)


def feature_count(columns: Mapping[str, str | Sequence[str]]) -> int:
    """D: a value and an indicator for each numeric column; for each other its categories and one more."""
    return sum(2 if isinstance(kind, str) else len(kind) + 1 for kind in columns.values())


def numeric_indices(columns: Mapping[str, str | Sequence[str]]) -> dict[str, int]:
    """Numeric column -> place of its value among the D features of encode.

    By place, because the names that one would give to the features are not distinct: a category may be called
    "other", and a column "age missing".
    """
    indices, start = {}, 0
    for name, kind in columns.items():
        if isinstance(kind, str):
            indices[name] = start
        start += feature_count({name: kind})
    return indices


def table_constants(
    config: DataConfig, columns: Mapping[str, str | Sequence[str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, std), each (D,), with which the columns of a table are standardised.

    Numeric values take those of the experiment, or NaN if it has none; indicators and one-hot codes take 0
    and 1.
    """
    mean, std = torch.zeros(feature_count(columns)), torch.ones(feature_count(columns))
    numeric = numeric_indices(columns)
    given = config.normalise
    for values, chosen in ((mean, given and given.mean), (std, given and given.std)):
        named = chosen if isinstance(chosen, dict) else dict.fromkeys(numeric, float("nan"))
        for name in named:
            if name not in numeric:
                raise ConfigError(f"data.normalise: {name!r} is no numeric column{nearest(name, numeric)}")
        for name, place in numeric.items():
            if name not in named:
                raise ConfigError(f"data.normalise: the numeric column {name!r} is missing")
            values[place] = named[name]
    return mean, std


def _numbers(texts: np.ndarray, where: str, lines: Sequence[int]) -> np.ndarray:
    """float32, NaN where missing."""
    absent = _absent(texts)
    try:
        with np.errstate(over="ignore"):
            values = np.where(absent, "nan", texts).astype(np.float64).astype(np.float32)
    except ValueError:
        row = next(i for i, text in enumerate(texts.tolist()) if not absent[i] and not _is_number(text))
        raise DataError(f"{where}, line {lines[row]}: {str(texts[row])!r} is not a number") from None
    odd = np.flatnonzero(~absent & ~np.isfinite(values))
    if len(odd):
        raise DataError(f"{where}, line {lines[odd[0]]}: {str(texts[odd[0]])!r} is not a finite number")
    return values


def _absent(texts: np.ndarray) -> np.ndarray:
    return np.isin(texts, np.array(MISSING, dtype=texts.dtype))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _discover(texts: Mapping[str, np.ndarray], path: Path) -> Columns:
    """Numeric where every value that is there is a number; else the distinct texts as categories."""
    columns: Columns = {}
    for name, values in texts.items():
        present = np.unique(values[~_absent(values)]).tolist()
        if all(_is_number(text) for text in present):
            columns[name] = "numeric"
        elif len(present) > MOST_CATEGORIES:
            raise DataError(
                f"{path}: column {name!r} has {len(present)} distinct texts, too many for categories; "
                "list the features in data.columns and leave it out"
            )
        else:
            columns[name] = tuple(present)
    if not columns:
        raise DataError(f"{path}: no feature beside the label")
    return columns
