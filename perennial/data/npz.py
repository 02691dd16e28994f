"""Reads arrays in a NumPy .npz file: x and y, a test part, and who holds each sample.

The arrays are x, y and, if they are there, site, patient, classes, site_names, and
x_test, y_test, site_test, patient_test.
"""

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from perennial.data.config import ArrayRole, DataConfig
from perennial.data.images import apply_window, conform
from perennial.data.labels import encode_labels
from perennial.data.samples import Samples, Source, choose_constants, find_stored_type
from perennial.data.splits import group_by_patient
from perennial.foundation.errors import DataError, suggest_nearest


def load_npz(config: DataConfig) -> Source:
    """uint8 or float32 images (N, C, H, W), with 1 or 3 channels, or float32 rows (N, D).

    In the file images may also be (N, H, W, C), 8-bit ones (N, H, W) too; the numbers of rows may have any
    type. Only 8-bit pixels have a known white: other images keep the scale and the size that they have, or
    become 8-bit ones by data.window.
    y: integers, which index into the array classes where there is one, or texts. site: likewise, with
    site_names. Object arrays are refused, so nothing in the file is ever executed.
    Raises DataError naming the file and the array.
    """
    assert config.path is not None
    path = Path(config.path).expanduser()
    named: dict[ArrayRole, str] = {"patient": config.patient} if config.patient is not None else {}
    arrays = _read(path, config.arrays | named)
    held = {
        role: convert_samples(arrays[role], f"{path}, {role}") for role in ("x", "x_test") if role in arrays
    }
    if len(held["x"]) == 0:
        raise DataError(f"{path}: x holds no sample")
    labels = []
    for role, x in held.items():
        given = arrays[_Y_OF[role]]
        if given.shape != (len(x),):
            raise DataError(f"{path}: {_Y_OF[role]} has shape {given.shape} for {len(x)} rows of {role}")
        labels.append(_resolve_names(given, arrays.get("classes"), f"{path}, {_Y_OF[role]}"))
    y, classes = encode_labels(
        np.concatenate(labels),
        config.classes,
        config.labels,
        lambda row: f"{path}, y[{row}]",
    )
    site_names = _list_site_names(arrays, path)
    parts, start = [], 0
    if config.partition.kind == "natural":
        _require_sites_of_all(arrays, path)
    for role, x in held.items():
        as_asked = _as_asked(x, config, f"{path}, {role}")
        site = _number_sites(arrays, "site" if role == "x" else "site_test", site_names, len(x), path)
        groups = None
        if config.patient is not None or "patient" in config.arrays:
            groups = _group_patients(arrays, "patient" if role == "x" else "patient_test", len(x), path)
        labels_here = torch.from_numpy(y[start : start + len(x)])
        parts.append(
            Samples(as_asked, labels_here, site, site_names, groups=groups, patients=groups is not None)
        )
        start += len(x)
    train, test = parts[0], parts[1] if len(parts) > 1 else None
    if test is not None:
        found, wanted = (f"{find_stored_type(part.x)} {tuple(part.x.shape[1:])}" for part in (test, train))
        if found != wanted:
            raise DataError(f"{path}: x_test holds {found}, but x holds {wanted}")
    return Source(train, test, classes, *choose_constants(config.normalise, train.x))


def read_samples(path: Path) -> torch.Tensor:
    """The samples in the array x of a file, without labels. Raises DataError as load_npz does."""
    with _open_npz(path) as file:
        _require(file, "x", path)
        values = file["x"]
    x = convert_samples(values, f"{path}, x")
    if len(x) == 0:
        raise DataError(f"{path}: x holds no sample")
    return x


_Y_OF: dict[str, ArrayRole] = {"x": "y", "x_test": "y_test"}
# What a file that is none, or is no longer whole, makes NumPy, zipfile and zlib raise.
_DAMAGED = (ValueError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError, AttributeError)
_ROLES: tuple[ArrayRole, ...] = get_args(ArrayRole)


@contextmanager
def _open_npz(path: Path) -> Iterator[Any]:
    """The open file; whatever goes wrong inside the block is an error that names it."""
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            raise DataError(f"{path}: one array without a name, as .npy files hold; needed: an .npz file")
        with found as file:
            yield file
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except _DAMAGED as error:
        raise DataError(f"{path}: not an .npz file of plain arrays ({error})") from error


def _require(file: Any, name: str, path: Path) -> None:
    if name not in file.files:
        found = ", ".join(file.files[:20])
        raise DataError(f"{path}: no array {name!r}{suggest_nearest(name, file.files)}; found {found}")


def _read(path: Path, renamed: dict[ArrayRole, str]) -> dict[str, np.ndarray]:
    """Role -> array. A role that the experiment names must be there; x and y always."""
    with _open_npz(path) as file:
        names = {role: renamed.get(role, role) for role in _ROLES}
        for role, name in names.items():
            if role in renamed or role in ("x", "y"):
                _require(file, name, path)
        arrays = {role: file[name] for role, name in names.items() if name in file.files}
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise DataError(f"{path}: x_test and y_test come together")
    for role in ("classes", "site_names"):
        if role in arrays:
            _require_distinct(arrays[role], f"{path}, {role}")
    return arrays


def _require_distinct(names: np.ndarray, where: str) -> None:
    if names.ndim != 1:
        raise DataError(f"{where}: must be a list of names; found shape {names.shape}")
    found, count = np.unique(_decode_texts(names, where), return_counts=True)
    if (count > 1).any():
        raise DataError(f"{where}: {found[count > 1][0].item()!r} is listed more than once")


def _decode_texts(values: np.ndarray, where: str) -> np.ndarray:
    """Names or numbers as texts; bytes are read as UTF-8."""
    if values.dtype.kind != "S":
        return values.astype(np.str_)
    try:
        return np.strings.decode(values, "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: {error.object!r} is not text in UTF-8") from None


def _resolve_names(values: np.ndarray, names: np.ndarray | None, where: str) -> np.ndarray:
    """(N,) texts of labels or sites that are texts, or integers (indices where names are given)."""
    if values.dtype.kind in "US":
        return _decode_texts(values, where)
    if values.dtype.kind not in "iu":
        raise DataError(f"{where}: must hold integers or texts; found {values.dtype}")
    if names is None:
        return values.astype(np.str_)
    odd = np.flatnonzero((values < 0) | (values >= len(names)))
    if len(odd):
        raise DataError(f"{where}[{odd[0]}]: {values[odd[0]]} is no index into {len(names)} names")
    return _decode_texts(names, where)[values]


def convert_samples(x: np.ndarray, where: str) -> torch.Tensor:
    """Samples of an array: uint8 (N, C, H, W), or float32 (N, C, H, W) or (N, D); where: named in errors.

    Raises DataError for an array that holds no samples.
    """
    eight_bits = x.ndim in (3, 4) and x.dtype == np.uint8
    if not (eight_bits or x.ndim == 2 or (x.ndim == 4 and x.dtype.kind == "f")) or 0 in x.shape[1:]:
        raise DataError(
            f"{where}: {x.dtype} of shape {x.shape}; allowed: uint8 images (N, H, W), (N, H, W, C) or "
            "(N, C, H, W), float images (N, C, H, W) or (N, H, W, C), numbers (N, D)"
        )
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[1] not in (1, 3):
        if x.shape[3] not in (1, 3):
            raise DataError(
                f"{where}: shape {x.shape} has neither 1 nor 3 channels, first or last; allowed: gray or rgb"
            )
        x = x.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(x)) if eight_bits else _convert_numbers(x, where)


def _convert_numbers(x: np.ndarray, where: str) -> torch.Tensor:
    if x.dtype.kind not in "fiub":
        raise DataError(f"{where}: must hold numbers; found {x.dtype}")
    values = np.ascontiguousarray(x, dtype=np.float32)
    finite = np.isfinite(values)
    if not finite.all():
        place = np.argwhere(~finite)[0].tolist()
        raise DataError(f"{where}{place}: {values[tuple(place)]} is not a finite number")
    return torch.from_numpy(values)


def _as_asked(x: torch.Tensor, config: DataConfig, where: str) -> torch.Tensor:
    """x with the size and colour that the experiment asks for, which only 8-bit images can be given."""
    if x.dtype != torch.uint8 and x.ndim == 4 and config.window is not None:
        x = torch.from_numpy(apply_window(x.numpy(), config.window, where))
    if x.dtype == torch.uint8:
        return conform(x, config.size, config.color, config.resize)
    if config.size is not None or config.color is not None:
        raise DataError(
            f"{where}: numbers that become float32; data.image_size and data.color ask for uint8 images, "
            "with pixels from 0 to 255, or for data.window: [low, high], which makes them so"
        )
    return x


def _group_patients(arrays: dict[str, np.ndarray], role: str, count: int, path: Path) -> np.ndarray | None:
    """(count, 32) groups; None for a test part that names no patients."""
    if role not in arrays and role == "patient_test":
        return None
    if role not in arrays or arrays[role].shape != (count,):
        found = arrays[role].shape if role in arrays else "nothing"
        raise DataError(f"{path}: {role}: found {found}, needed one patient for each of {count} samples")
    texts = _resolve_names(arrays[role], None, f"{path}, {role}").tolist()
    return group_by_patient(texts, lambda row: f"{path}, {role}[{row}]")


def _list_site_names(arrays: dict[str, np.ndarray], path: Path) -> tuple[str, ...]:
    if "site_names" in arrays:
        return tuple(_decode_texts(arrays["site_names"], f"{path}, site_names").tolist())
    held = [
        _resolve_names(arrays[role], None, f"{path}, {role}")
        for role in ("site", "site_test")
        if role in arrays
    ]
    return tuple(np.unique(np.concatenate(held)).tolist()) if held else ()


def _require_sites_of_all(arrays: dict[str, np.ndarray], path: Path) -> None:
    for given, lacking, samples in (("site", "site_test", "x_test"), ("site_test", "site", "x")):
        if samples in arrays and given in arrays and lacking not in arrays:
            raise DataError(
                f"{path}: {given} is there and {lacking} is missing, so nobody knows which site holds the "
                f"samples of {samples}; add {lacking}"
                + (", or take x_test and y_test out, and sites hold out a part of x" * (samples == "x_test"))
            )


def _number_sites(
    arrays: dict[str, np.ndarray], role: str, names: tuple[str, ...], count: int, path: Path
) -> torch.Tensor | None:
    if role not in arrays:
        return None
    if arrays[role].shape != (count,):
        raise DataError(f"{path}: {role} has shape {arrays[role].shape} for {count} samples")
    given = np.array(names) if "site_names" in arrays else None
    texts = _resolve_names(arrays[role], given, f"{path}, {role}")
    position = {name: index for index, name in enumerate(names)}
    found, index = np.unique(texts, return_inverse=True)
    for name in found.tolist():
        if name not in position:
            raise DataError(f"{path}: {role} {name!r} is not in site_names{suggest_nearest(name, names)}")
    return torch.from_numpy(np.array([position[name] for name in found.tolist()], dtype=np.int64)[index])
