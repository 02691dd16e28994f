"""Inputs for a trained model: image files, or rows of tables and arrays."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perennial.data.config import DataConfig
from perennial.data.csv_file import CsvFile
from perennial.data.folder import SUFFIXES
from perennial.data.images import ImageReading, apply_window, conform, is_dicom, read_images
from perennial.data.npz import read_samples
from perennial.data.samples import Stored, fill_missing, find_stored_type
from perennial.data.table import read_table
from perennial.data.table_columns import BadCells, encode, locate_features, locate_numbers, mask_missing
from perennial.foundation.errors import DataError

BATCH = 256
TABLES = frozenset({".csv", ".npz"})
Columns = Mapping[str, str | Sequence[str]]


def read_inputs(
    paths: Sequence[Path],
    shape: tuple[int, ...],
    stored: Stored,
    fill: Tensor,
    data: DataConfig,
    columns: Columns | None = None,
) -> Iterator[tuple[list[str], Tensor]]:
    """(names, x) of at most 256 samples at a time, x as a source of data delivers it.

    shape: (C, H, W) or (D,) of the model's inputs. stored: the numbers that it was trained on; others would
    have another scale. fill: (D,), for missing numbers of a table. data: the block by which the
    training data were read; size and colour of images are the model's.
    columns: of a table, as in the model's file. A CSV file needs these columns and may have others; a .npz
    file gives its array x, 8-bit images of any size and of either colour; any other file is an image. A row's
    name is its file with its line, or its index.
    Raises DataError naming the file, and the line or column where there is one.
    """
    of_images = len(shape) == 3
    images = [path for path in paths if of_images and path.suffix != ".npz"]
    if images and stored != "uint8":
        raise DataError(
            f"{images[0]}: an image file has 8-bit pixels; this model takes float32 images in the "
            "scale of those that it was trained on: give them as x of an .npz file"
        )
    color = "gray" if shape[0] == 1 else "rgb"
    reading = ImageReading.of(data)
    if of_images:
        reading = replace(reading, size=(shape[1], shape[2]), color=color, unreadable="refuse")
    for start in range(0, len(images), BATCH):
        part = images[start : start + BATCH]
        yield [str(path) for path in part], torch.from_numpy(read_images(part, reading).x)
    for path in paths:
        if of_images and path.suffix != ".npz":
            continue
        names, x = _read_array(path) if path.suffix == ".npz" else _read_rows(path, columns, data)
        if stored == "uint8" and find_stored_type(x) != stored and x.ndim == 4 and reading.window is not None:
            x = torch.from_numpy(apply_window(x.numpy(), reading.window, f"{path}, x"))
        if find_stored_type(x) != stored:
            raise DataError(
                f"{path}: x becomes {find_stored_type(x)}; this model takes {stored}, of another scale"
            )
        x = conform(x, reading.size, color, reading.resize) if stored == "uint8" else x
        if x.shape[1:] != shape:
            raise DataError(f"{path}: samples of shape {tuple(x.shape[1:])}; this model takes {shape}")
        fill_missing(x, fill)
        for start in range(0, len(x), BATCH):
            yield names[start : start + BATCH], x[start : start + BATCH]


def _read_array(path: Path) -> tuple[list[str], Tensor]:
    x = read_samples(path)
    return [f"{path}[{index}]" for index in range(len(x))], x


def _read_rows(path: Path, columns: Columns | None, data: DataConfig) -> tuple[list[str], Tensor]:
    if columns is None:
        raise DataError(f"{path}: this model takes rows without column names; give them as x of a .npz file")
    file = read_table(data, path)
    for name in columns:
        if name not in file.columns:
            raise DataError(f"{path}: no column {name!r}; this model takes {', '.join(columns)}")
    bad = BadCells(file)
    x = np.ascontiguousarray(encode(file, columns, data.missing, bad))
    bad.refuse()
    return [f"{path}:{line}" for line in file.lines], torch.from_numpy(x)


FURTHEST = 3.5
MOST_FAR, FAR_MEDIAN, OTHER_SPREAD = 0.05, 2.0, 8.0
FEW_ROWS = 20


def describe_strange_columns(
    file: CsvFile, columns: Columns, mean: Tensor, std: Tensor, missing: Sequence[str] = ()
) -> list[str]:
    """A sentence for each column of a table that is unlike the model's training data.

    Of numbers: far from the training mean in its deviations, or with another spread, as in another unit; of
    categories: texts that training did not have. mean, std: (D,) of the model's inputs. The least and the
    greatest training value are single patients' and stand in no model.
    """
    numbers = locate_numbers(columns)
    known = {name: kind for name, kind in columns.items() if name in file.columns}
    if not known:
        # another table: the reading says what it lacks
        return []
    values = encode(file, known, missing, BadCells(file))
    found = []
    for name, places in locate_features(known).items():
        kind, texts = known[name], file.columns[name]
        if not isinstance(kind, str):
            strange = (values[:, places.stop - 1] > 0) & ~mask_missing(texts, missing)
            if strange.any():
                shown = ", ".join(map(repr, np.unique(texts[strange]).tolist()[:4]))
                found.append(
                    f"column {name!r}: {int(strange.sum())} of {len(texts)} rows have {shown}, which "
                    "training did not have"
                )
            continue
        here = values[~np.isnan(values[:, places.start]), places.start].astype(np.float64)
        middle, spread = float(mean[numbers[name]]), float(std[numbers[name]])
        if kind != "numeric" or not len(here) or not spread > 0:
            continue
        away = (here - middle) / spread
        far = int((np.abs(away) > FURTHEST).sum())
        many = len(here) >= FEW_ROWS
        moved = many and abs(float(np.median(away))) > FAR_MEDIAN
        other = many and not 1 / OTHER_SPREAD < float(away.std()) < OTHER_SPREAD
        if far > (MOST_FAR * len(here) if many else 0) or moved or other:
            found.append(
                f"column {name!r}: values around {np.median(here):.4g} with a deviation of {here.std():.3g}, "
                f"{far} of {len(here)} far from the training data's {middle:.4g} with {spread:.3g}; is it in "
                "another unit?"
            )
    return found


def list_files(paths: Sequence[Path], *, of_images: bool) -> list[Path]:
    """The paths, with each folder replaced by the files inside it that a model can read, sorted by name.

    of_images: whether the model takes images; else tables and arrays are read. Hidden files do not count.
    Raises DataError naming a path that is not there, or a folder without such a file.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: no such file or folder")
        if not path.is_dir():
            found.append(path)
            continue
        wanted = (SUFFIXES | {".npz"}) if of_images else TABLES
        inside = sorted(
            file
            for file in path.rglob("*")
            if not any(part.startswith(".") for part in file.relative_to(path).parts)
            and file.is_file()
            and (file.suffix.lower() in wanted or (of_images and is_dicom(file)))
        )
        if not inside:
            what, allowed = "image" if of_images else "table", ", ".join(sorted(wanted))
            raise DataError(f"{path}: no {what} in this folder; allowed: {allowed}")
        found += inside
    return found
