"""Images of any mode and size, as 8-bit arrays of one mode and one size."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from perennial.foundation.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

Color = Literal["rgb", "gray"]
MOST_BAD_FILES = 10
RESIZING = (
    "bilinear with antialiasing, as Pillow's Image.resize(size, Resampling.BILINEAR) on 8-bit values; the "
    "aspect is not kept"
)
"""How an image of another size becomes one of data.image_size, for whoever feeds an exported model."""
# ITU-R 601 luma in 1/65536, the weights that Pillow uses for its mode L.
_LUMA = (19595, 38470, 7471)


def read_images(paths: Sequence[Path], size: tuple[int, int] | None, color: Color) -> np.ndarray:
    """(N, C, H, W) uint8 of image files, in the order of paths; C is 3 for "rgb", 1 for "gray".

    Palettes become colours, 16 bits become 8, alpha is ignored, camera rotation is applied, an animation is
    its first frame. size: (H, W), aspect not kept; None asks that all files have the same.
    Raises DataError naming up to ten files that cannot be used.
    """
    bad: list[str] = []
    first = next(
        (array for array in (_decoded(path, size, color, []) for path in paths) if array is not None), None
    )
    if first is None:
        for path in paths[:MOST_BAD_FILES]:
            _decoded(path, size, color, bad)
        raise DataError(_bad_files(bad))
    out = np.empty((len(paths), *first.shape), dtype=np.uint8)

    def place(index: int) -> None:
        if len(bad) >= MOST_BAD_FILES:
            return
        array = _decoded(paths[index], size, color, bad)
        if array is None:
            return
        if array.shape != first.shape:
            sizes = f"{array.shape[2]}x{array.shape[1]} where others are {first.shape[2]}x{first.shape[1]}"
            bad.append(f"{paths[index]}: {sizes}; set data.image_size")
            return
        out[index] = array

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(place, range(len(paths))))
    if bad:
        raise DataError(_bad_files(sorted(bad)))
    return out


def _bad_files(bad: Sequence[str]) -> str:
    more = f"\n  (stopped after {MOST_BAD_FILES})" if len(bad) >= MOST_BAD_FILES else ""
    return "images that cannot be used:\n  " + "\n  ".join(bad) + more


def _decoded(path: Path, size: tuple[int, int] | None, color: Color, bad: list[str]) -> np.ndarray | None:
    """(C, H, W) uint8, or None with the reason added to bad."""
    from PIL import Image, ImageOps

    try:
        if path.stat().st_size == 0:
            raise ValueError("the file is empty (0 bytes)")
        with Image.open(path) as opened:
            image = _eight_bits(ImageOps.exif_transpose(opened))
            image = image.convert("L" if color == "gray" else "RGB")
            if size is not None and image.size != (size[1], size[0]):
                image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
            array = np.asarray(image)
    # Pillow's decoders let many kinds of error escape from a damaged file.
    except Exception as error:
        bad.append(f"{path}: {error or type(error).__name__}")
        return None
    return np.ascontiguousarray(array.reshape(array.shape[0], array.shape[1], -1).transpose(2, 0, 1))


def _eight_bits(image: "Image.Image") -> "Image.Image":
    """The image in a mode that Pillow can convert to RGB or L without loss of meaning."""
    from PIL import Image

    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA")
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError("32-bit values outside 0..65535; convert the image to 8 or 16 bits")
        return Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("floating-point pixels have no known white; convert the image to 8 or 16 bits")
    return image


def conform(x: Tensor, size: tuple[int, int] | None, color: Color | None) -> Tensor:
    """x, uint8 (N, C, H, W), with the size and number of channels asked for; None keeps what is there.

    Raises DataError where the channels are neither 1 nor 3 and a colour is asked for.
    """
    wanted = {"rgb": 3, "gray": 1, None: x.shape[1]}[color]
    if wanted != x.shape[1]:
        if x.shape[1] not in (1, 3):
            raise DataError(f"data.color: images of {x.shape[1]} channels cannot become {color!r}")
        x = x.expand(-1, 3, -1, -1).contiguous() if wanted == 3 else _luma(x)
    if size is not None and tuple(x.shape[2:]) != size:
        x = F.interpolate(x, size=size, mode="bilinear", antialias=True)
    return x


def _luma(x: Tensor) -> Tensor:
    red, green, blue = (
        channel.to(torch.int32) * weight for channel, weight in zip(x.unbind(1), _LUMA, strict=True)
    )
    return ((red + green + blue + 32768) >> 16).to(torch.uint8).unsqueeze(1)
