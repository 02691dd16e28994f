"""Benchmark packs: a ZIP of lossless WebP contact sheets, .npy arrays, meta.json with each array's sha256.

An image array NAME is kept as sheets NAME_000.webp, NAME_001.webp, ..., each a grid of tiles in row order. A
pack holds x_train, y_train, x_test and y_test; or x and y, with is_test for an official split, and site.
"""

import hashlib
import io
import json
import os
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perennial.data.config import DataConfig
from perennial.data.images import conform
from perennial.data.samples import Samples, Source, choose_constants
from perennial.data.splits import group_by_patient
from perennial.foundation.errors import DataError, suggest_nearest


def load_pack(config: DataConfig) -> Source:
    """uint8 (N, C, H, W) with the classes, sites and official test split that the pack has.

    Raises DataError naming the file, and the array whose content is not what meta.json promises.
    """
    assert config.path is not None
    path = Path(config.path).expanduser()
    try:
        with zipfile.ZipFile(path) as pack:
            meta = json.loads(pack.read("meta.json"))
            described = meta["arrays"]
            roles = ("x_train", "y_train", "x_test", "y_test") if "x_train" in described else ("x", "y")
            optional = [name for name in ("site", "is_test") if name in described and "x" in roles]
            if config.patient is not None:
                if config.patient not in described or "x" not in roles:
                    hint = suggest_nearest(config.patient, described)
                    raise DataError(f"{path}: data.patient: no array {config.patient!r}{hint}")
                optional.append(config.patient)
            arrays = {name: _read_array(pack, name, described[name], path) for name in (*roles, *optional)}
            classes = tuple(meta.get("class_names") or meta["fine_names"])
            site_names = tuple(meta["site_names"]) if "site" in arrays else ()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, KeyError, ValueError, TypeError) as error:
        raise DataError(f"{path}: not a whole benchmark pack ({error})") from error

    def build_samples(part: str, rows: np.ndarray | None = None) -> Samples:
        chosen = slice(None) if rows is None else rows
        x = np.ascontiguousarray(arrays["x" + part][chosen].transpose(0, 3, 1, 2))
        y = torch.from_numpy(arrays["y" + part][chosen].astype(np.int64))
        site = torch.from_numpy(arrays["site"][chosen].astype(np.int64)) if site_names else None
        groups = None
        if config.patient is not None:
            names = arrays[config.patient][chosen].astype(np.str_).tolist()
            groups = group_by_patient(names, lambda row: f"{path}, {config.patient}[{row}]")
        images = conform(torch.from_numpy(x), config.size, config.color, config.resize)
        return Samples(images, y, site, site_names, groups=groups, patients=groups is not None)

    if "x_train" in arrays:
        train, test = build_samples("_train"), build_samples("_test")
    elif "is_test" in arrays:
        is_test = arrays["is_test"].astype(bool)
        train, test = build_samples("", np.flatnonzero(~is_test)), build_samples("", np.flatnonzero(is_test))
    else:
        train, test = build_samples(""), None
    return Source(train, test, classes, *choose_constants(config.normalise, train.x))


def _read_array(pack: zipfile.ZipFile, name: str, described: dict[str, Any], path: Path) -> np.ndarray:
    """The array, images as (N, H, W, C), after its sha256 is checked."""
    if described["kind"] == "sheets":
        array = _read_tiles(pack, name, described)
    else:
        array = np.load(io.BytesIO(pack.read(f"{name}.npy")), allow_pickle=False)
    if hashlib.sha256(array.data).hexdigest() != described["sha256"]:
        raise DataError(f"{path}: array {name!r} is damaged: its sha256 is not the one in meta.json")
    return array


def _read_tiles(pack: zipfile.ZipFile, name: str, described: dict[str, Any]) -> np.ndarray:
    count, height, width, channels = (int(described[key]) for key in "nhwc")
    sheets = [pack.read(f"{name}_{index:03d}.webp") for index in range(described["sheets"])]

    def cut(sheet: bytes) -> np.ndarray:
        from PIL import Image

        with Image.open(io.BytesIO(sheet)) as image:
            pixels = np.asarray(image.convert("RGB"))[:, :, :channels]
        grid = pixels.reshape(pixels.shape[0] // height, height, pixels.shape[1] // width, width, channels)
        return grid.swapaxes(1, 2).reshape(-1, height, width, channels)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tiles = np.concatenate(list(pool.map(cut, sheets)))
    if len(tiles) < count:
        raise ValueError(f"{name} holds {len(tiles)} tiles of {count}")
    return tiles[:count]
