"""Image files of any kind, size and depth, as 8-bit arrays of one colour mode and one size."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from perennial.data.config import DataConfig, Window, describe_skipped
from perennial.data.dicom import find_full_range, read_dicom, refuse_several, scale_to_uint8
from perennial.foundation.errors import ConfigError, DataError
from perennial.foundation.files import make_folder, replace_file

if TYPE_CHECKING:
    from PIL import Image


Color = Literal["rgb", "gray"]
Resize = Literal["stretch", "pad", "crop"]
MOST_BAD_FILES = 10
_LAYOUT = 2
"""Of the file of decoded images."""
DICOM_SUFFIXES = frozenset((".dcm", ".dicom", ".ima"))
_BILINEAR = (
    "bilinear with antialiasing, as Pillow's Image.resize(size, Resampling.BILINEAR) on 8-bit values; "
)
RESIZING: dict[Resize, str] = {
    "stretch": f"{_BILINEAR}the aspect is not kept",
    "pad": f"{_BILINEAR}the aspect is kept, black beside the whole image, as Pillow's ImageOps.pad",
    "crop": f"{_BILINEAR}the aspect is kept, the middle of the image, as Pillow's ImageOps.fit",
}
"""How an image of another size becomes one of data.image_size, for whoever feeds an exported model."""
# ITU-R 601 luma in 1/65536, the weights that Pillow uses for its mode L.
_LUMA = (19595, 38470, 7471)


@dataclass(frozen=True)
class ImageReading:
    """How files become arrays.

    size: (H, W); None asks that all files have the same. color: "rgb" or "gray". resize, window,
    unreadable: as in DataConfig.
    """

    size: tuple[int, int] | None = None
    color: Color = "rgb"
    resize: Resize = "stretch"
    window: Window | None = None
    unreadable: Literal["refuse", "skip"] = "refuse"

    @classmethod
    def of(cls, config: DataConfig) -> "ImageReading":
        """The reading that a data block asks for; in colour unless it says gray."""
        color = config.color or "rgb"
        return cls(config.size, color, config.resize, config.window, config.unreadable)


@dataclass(frozen=True)
class ImagesRead:
    """The images that could be read.

    x: (n, C, H, W) uint8. rows: indices of the n paths among those asked for. notes: what a person should
    know of them.
    """

    x: np.ndarray
    rows: np.ndarray
    notes: tuple[str, ...]


def read_images(paths: Sequence[Path], reading: ImageReading) -> ImagesRead:
    """The images of files, in the order of paths; C is 3 for "rgb", 1 for "gray".

    Palettes become colours, alpha is ignored, camera rotation is applied, an animation is its first frame.
    More than 8 bits become 8 by the window, without which they are refused.
    Raises DataError naming up to ten files that cannot be used, where they may not be left out.
    """
    bad: dict[int, str] = {}
    modes: list[str] = [""] * len(paths)
    most = MOST_BAD_FILES if reading.unreadable == "refuse" else len(paths)
    first = None
    for index, path in enumerate(paths):
        if (first := _read(path, reading, index, bad, modes)) is not None or len(bad) >= most:
            break
    if first is None:
        raise DataError(_describe_bad_files(list(bad.values())))
    out = np.empty((len(paths), *first.shape), dtype=np.uint8)

    def place(index: int) -> None:
        if len(bad) >= most or index in bad:
            return
        array = _read(paths[index], reading, index, bad, modes)
        if array is None:
            return
        if array.shape != first.shape:
            sizes = f"{array.shape[2]}x{array.shape[1]} where others are {first.shape[2]}x{first.shape[1]}"
            bad[index] = f"{paths[index]}: {sizes}; set data.image_size"
            return
        out[index] = array

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(place, range(len(paths))))
    notes = _describe_modes(modes, reading.color)
    if not bad:
        return ImagesRead(out, np.arange(len(paths)), notes)
    note = describe_skipped(reading.unreadable, len(bad), len(paths), "images that")
    if note is None:
        raise DataError(_describe_bad_files(sorted(bad.values())))
    rows = np.array([index for index in range(len(paths)) if index not in bad])
    named = "; ".join(sorted(bad.values())[:3])
    return ImagesRead(out[rows], rows, (*notes, f"{note}, left out: {named}"))


def read_cached_images(cache: Path | None, paths: Sequence[Path], reading: ImageReading) -> ImagesRead:
    """read_images, or what it returned last time for the same files and the same reading.

    A deployed site answers each message in a fresh process; decoding a folder of photographs again every time
    would cost more than training on them.
    cache: a private folder on the site's own disk, one file in it; None decodes always. A file counts as the
    same while its path, its length and its time of change are. A damaged cache is decoded anew.
    """
    if cache is None:
        return read_images(paths, reading)
    from safetensors import SafetensorError
    from safetensors.numpy import load, save

    fingerprint = _hash_files(paths, reading)
    path = cache / "images.safetensors"
    if fingerprint is not None and path.exists():
        try:
            arrays = load(path.read_bytes())
        except SafetensorError:
            arrays = {}
        if arrays.keys() >= {"x", "rows", "notes"} and arrays["key"].tobytes() == fingerprint:
            # what reads them keeps them from `perennial site clean`
            with suppress(OSError):
                os.utime(path)
            return ImagesRead(arrays["x"], arrays["rows"], tuple(json.loads(arrays["notes"].tobytes())))
    found = read_images(paths, reading)
    if fingerprint is not None:
        make_folder(cache)
        key, notes = (
            np.frombuffer(text, dtype=np.uint8) for text in (fingerprint, json.dumps(found.notes).encode())
        )
        replace_file(path, save({"key": key, "x": found.x, "rows": found.rows, "notes": notes}))
    return found


def _hash_files(paths: Sequence[Path], reading: ImageReading) -> bytes | None:
    """None where a file is missing or cannot be one, which decoding will report by name."""
    try:
        states = [path.stat() for path in paths]
    except (OSError, ValueError):
        return None
    files = [[str(path), state.st_size, state.st_mtime_ns] for path, state in zip(paths, states, strict=True)]
    return hashlib.sha256(json.dumps([_LAYOUT, repr(reading), files]).encode()).digest()


def _describe_bad_files(bad: Sequence[str]) -> str:
    shown = bad[:MOST_BAD_FILES]
    more = f"\n  (stopped after {MOST_BAD_FILES})" if len(bad) >= MOST_BAD_FILES else ""
    return "images that cannot be used:\n  " + "\n  ".join(shown) + more


def _describe_modes(modes: Sequence[str], color: Color) -> tuple[str, ...]:
    found = Counter(modes)
    if not (found["gray"] and found["colour"]):
        return ()
    return (
        f"{found['gray']} images are grey and {found['colour']} in colour; all become {color!r} "
        "(data.color), so that a class or site of one kind could be told by that alone",
    )


def _read(
    path: Path, reading: ImageReading, index: int, bad: dict[int, str], modes: list[str]
) -> np.ndarray | None:
    """(C, H, W) uint8, or None with the reason added to bad; notes whether the file is in colour."""
    from PIL import Image, ImageOps

    try:
        if path.stat().st_size == 0:
            raise ValueError("the file is empty (0 bytes)")
        if is_dicom(path):
            image = Image.fromarray(read_dicom(path, reading.window))
            modes[index] = "gray" if image.mode == "L" else "colour"
            array = np.asarray(_convert_image(image, reading))
        else:
            with Image.open(path) as opened:
                if opened.format == "TIFF":
                    # its pages are images of their own; frames of an animation are not
                    refuse_several(int(getattr(opened, "n_frames", 1)))
                image = _reduce_depth(ImageOps.exif_transpose(opened), reading.window)
                modes[index] = "gray" if image.mode in ("1", "L", "LA") else "colour"
                array = np.asarray(_convert_image(image, reading))
    except ConfigError:
        raise
    # Pillow's decoders let many kinds of error escape from a damaged file.
    except Exception as error:
        bad[index] = f"{path}: {error or type(error).__name__}"
        return None
    return np.ascontiguousarray(array.reshape(array.shape[0], array.shape[1], -1).transpose(2, 0, 1))


def is_dicom(path: Path) -> bool:
    """Whether a file is DICOM: by its suffix, or for a name without one by the four letters inside."""
    suffix = path.suffix.lower()
    if suffix in DICOM_SUFFIXES:
        return True
    if suffix and not suffix[1:].isdecimal():
        return False
    try:
        with path.open("rb") as file:
            return file.read(132)[128:] == b"DICM"
    except OSError:
        return False


def _convert_image(image: "Image.Image", reading: ImageReading) -> "Image.Image":
    """The image in the colour and size asked for."""
    from PIL import Image, ImageOps

    image = image.convert("L" if reading.color == "gray" else "RGB")
    if reading.size is None or image.size == (size := (reading.size[1], reading.size[0])):
        return image
    if reading.resize == "pad":
        return ImageOps.pad(image, size, Image.Resampling.BILINEAR)
    if reading.resize == "crop":
        return ImageOps.fit(image, size, Image.Resampling.BILINEAR)
    return image.resize(size, Image.Resampling.BILINEAR)


def _reduce_depth(image: "Image.Image", window: Window | None) -> "Image.Image":
    """The image in a mode that Pillow can convert to RGB or L without loss of meaning."""
    from PIL import Image

    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA")
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        values = np.asarray(image)
        # Pillow gives 16-bit greys of some formats as 32-bit integers
        of = "uint16" if image.mode != "F" and values.min() >= 0 and values.max() <= 65535 else values.dtype
        return Image.fromarray(scale_to_uint8(values, window, find_full_range(np.dtype(of))))
    return image


def conform(
    x: Tensor, size: tuple[int, int] | None, color: Color | None, resize: Resize = "stretch"
) -> Tensor:
    """x, uint8 (N, C, H, W), with the size and number of channels asked for; None keeps what is there.

    Raises DataError where the channels are neither 1 nor 3 and a colour is asked for.
    """
    wanted = {"rgb": 3, "gray": 1, None: x.shape[1]}[color]
    if wanted != x.shape[1]:
        if x.shape[1] not in (1, 3):
            raise DataError(f"data.color: images of {x.shape[1]} channels cannot become {color!r}")
        x = x.expand(-1, 3, -1, -1).contiguous() if wanted == 3 else _compute_luma(x)
    if size is None or tuple(x.shape[2:]) == size:
        return x
    if resize == "stretch":
        return F.interpolate(x, size=size, mode="bilinear", antialias=True)
    ratios = size[0] / x.shape[2], size[1] / x.shape[3]
    ratio = min(ratios) if resize == "pad" else max(ratios)
    inner = [max(1, round(side * ratio)) for side in x.shape[2:]]
    x = F.interpolate(x, size=inner, mode="bilinear", antialias=True)
    gap = [wanted - has for wanted, has in zip(size, inner, strict=True)]
    # negative padding crops
    (above, below), (left, right) = [(space // 2, space - space // 2) for space in gap]
    return F.pad(x, (left, right, above, below))


def apply_window(values: np.ndarray, window: Window | None, where: str) -> np.ndarray:
    """Images of more than 8 bits, in any layout, as uint8 by a window. where: names them in errors.

    Raises DataError without a window, or with one that only files have.
    """
    try:
        return scale_to_uint8(values, window, find_full_range(values.dtype))
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None


def _compute_luma(x: Tensor) -> Tensor:
    red, green, blue = (
        channel.to(torch.int32) * weight for channel, weight in zip(x.unbind(1), _LUMA, strict=True)
    )
    return ((red + green + blue + 32768) >> 16).to(torch.uint8).unsqueeze(1)
