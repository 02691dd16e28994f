"""Arrays in a NumPy .npz file: x, y and, if given, site, x_test, y_test, site_test, classes, site_names."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.config import ArrayRole, DataConfig
from data.images import conform
from data.labels import encode_labels
from data.samples import Samples, Source, constants
from foundation.errors import DataError, nearest


def load_npz(config: DataConfig) -> Source:
    """uint8 images (N, C, H, W), with 1 or 3 channels, or float32 (N, D) or (N, C, H, W).

    In the file 8-bit images may also be (N, H, W) or (N, H, W, C); numbers may have any type.
    y: integers, which index into the array classes where there is one, or texts. site: likewise, with
    site_names. Object arrays are refused, so nothing in the file is ever executed.
    Raises DataError naming the file and the array.
    """
    assert config.path is not None
    path = Path(config.path).expanduser()
    arrays = _read(path, config.arrays)
    held = [arrays[role] for role in ("y", "y_test") if role in arrays]
    for role in ("y", "y_test"):
        if role in arrays and arrays[role].shape != arrays[_X_OF[role]].shape[:1]:
            rows = f"{len(arrays[_X_OF[role]])} rows of {_X_OF[role]}"
            raise DataError(f"{path}: {role} has shape {arrays[role].shape} for {rows}")
    y, classes = encode_labels(
        _names(np.concatenate(held), arrays.get("classes"), f"{path}, y"),
        config.classes,
        config.labels,
        lambda row: f"{path}, y[{row}]",
    )
    site_names = _site_names(arrays, path)
    parts, start = [], 0
    for role, labels in zip(("x", "x_test"), held, strict=False):
        x = _features(arrays[role], f"{path}, {role}")
        x = conform(x, config.size, config.color) if x.dtype == torch.uint8 else x
        site = _sites(arrays, "site" if role == "x" else "site_test", site_names, len(x), path)
        parts.append(Samples(x, torch.from_numpy(y[start : start + len(labels)]), site, site_names))
        start += len(labels)
    train, test = parts[0], parts[1] if len(parts) > 1 else None
    if test is not None and test.x.shape[1:] != train.x.shape[1:]:
        raise DataError(
            f"{path}: x_test holds {tuple(test.x.shape[1:])}, but x holds {tuple(train.x.shape[1:])}"
        )
    return Source(train, test, classes, *constants(config.normalise, train.x))


def read_samples(path: Path, name: str = "x") -> torch.Tensor:
    """The samples in one array of a file, without labels. Raises DataError as load_npz does."""
    with _opened(path) as file:
        _require(file, name, path)
        values = file[name]
    _require_samples(values, f"{path}: {name}")
    return _features(values, f"{path}, {name}")


_X_OF = {"y": "x", "y_test": "x_test"}
_ROLES: tuple[ArrayRole, ...] = ("x", "y", "site", "x_test", "y_test", "site_test", "classes", "site_names")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The open file; whatever goes wrong inside the block is an error that names it."""
    try:
        with _archive(np.load(path, allow_pickle=False)) as file:
            yield file
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except Exception as error:  # damage shows in zipfile, in zlib, or in NumPy's reading of a header
        raise DataError(f"{path}: not an .npz file of plain arrays ({error})") from error


def _archive(loaded: Any) -> Any:
    if not isinstance(loaded, np.lib.npyio.NpzFile):
        raise ValueError("one array, as in an .npy file")
    return loaded


def _require(file: Any, name: str, path: Path) -> None:
    if name not in file.files:
        found = ", ".join(file.files[:20])
        raise DataError(f"{path}: no array {name!r}{nearest(name, file.files)}; found {found}")


def _read(path: Path, renamed: dict[ArrayRole, str]) -> dict[str, np.ndarray]:
    """Role -> array. A role that the experiment names must be there; x and y always."""
    with _opened(path) as file:
        names = {role: renamed.get(role, role) for role in _ROLES}
        for role, name in names.items():
            if role in renamed or role in ("x", "y"):
                _require(file, name, path)
        arrays = {role: file[name] for role, name in names.items() if name in file.files}
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise DataError(f"{path}: x_test and y_test come together")
    _require_samples(arrays["x"], f"{path}: x")
    for role in ("classes", "site_names"):
        if role in arrays and arrays[role].ndim != 1:
            raise DataError(
                f"{path}: {role} has shape {arrays[role].shape}, allowed one name after the other"
            )
    return arrays


def _require_samples(values: np.ndarray, where: str) -> None:
    if values.ndim == 0 or len(values) == 0:
        raise DataError(f"{where} holds no sample")


def _names(values: np.ndarray, names: np.ndarray | None, where: str) -> np.ndarray:
    """(N,) texts of labels or sites that are texts, or integers (indices where names are given)."""
    if values.dtype.kind in "US":
        return values.astype(np.str_)
    if values.dtype.kind not in "iu":
        raise DataError(f"{where}: must hold integers or texts; found {values.dtype}")
    if names is None:
        return values.astype(np.str_)
    odd = np.flatnonzero((values < 0) | (values >= len(names)))
    if len(odd):
        raise DataError(f"{where}[{odd[0]}]: {values[odd[0]]} is no index into {len(names)} names")
    return names.astype(np.str_)[values]


def _features(x: np.ndarray, where: str) -> torch.Tensor:
    if x.ndim == 2:
        return _finite(x, where)
    if x.ndim == 4 and x.dtype.kind == "f":
        return _finite(x, where)
    if x.ndim not in (3, 4) or x.dtype != np.uint8:
        raise DataError(
            f"{where}: {x.dtype} of shape {x.shape}; allowed: uint8 images (N, H, W), (N, H, W, C) or "
            "(N, C, H, W), float images (N, C, H, W), numbers (N, D)"
        )
    if x.ndim == 3:
        x = x[:, None]
    elif x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(x))


def _finite(x: np.ndarray, where: str) -> torch.Tensor:
    if x.dtype.kind not in "fiub":
        raise DataError(f"{where}: must hold numbers; found {x.dtype}")
    values = np.ascontiguousarray(x, dtype=np.float32)
    finite = np.isfinite(values)
    if not finite.all():
        place = np.argwhere(~finite)[0].tolist()
        raise DataError(f"{where}{place}: {values[tuple(place)]} is not a finite number")
    return torch.from_numpy(values)


def _site_names(arrays: dict[str, np.ndarray], path: Path) -> tuple[str, ...]:
    if "site_names" in arrays:
        return tuple(arrays["site_names"].astype(np.str_).tolist())
    held = [_names(arrays[role], None, f"{path}, {role}") for role in ("site", "site_test") if role in arrays]
    return tuple(np.unique(np.concatenate(held)).tolist()) if held else ()


def _sites(
    arrays: dict[str, np.ndarray], role: str, names: tuple[str, ...], count: int, path: Path
) -> torch.Tensor | None:
    if role not in arrays:
        return None
    if arrays[role].shape != (count,):
        raise DataError(f"{path}: {role} has shape {arrays[role].shape} for {count} samples")
    given = np.array(names) if "site_names" in arrays else None
    texts = _names(arrays[role], given, f"{path}, {role}")
    position = {name: index for index, name in enumerate(names)}
    found, index = np.unique(texts, return_inverse=True)
    for name in found.tolist():
        if name not in position:
            raise DataError(f"{path}: {role} {name!r} is not in site_names{nearest(name, names)}")
    return torch.from_numpy(np.array([position[name] for name in found.tolist()], dtype=np.int64)[index])
