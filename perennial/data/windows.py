"""From pixels of more than 8 bits to 8: which values become black and white, and which frame is the image."""

from typing import Literal

import numpy as np

from perennial.data.config import Window


def full_range(dtype: np.dtype) -> tuple[float, float] | None:
    """(least, greatest) value of an integer type; None for floats, which have no full range."""
    if dtype.kind not in "iu":
        return None
    limits = np.iinfo(dtype)
    return float(limits.min), float(limits.max)


def eight_bits(values: np.ndarray, window: Window | None, whole: tuple[float, float] | None) -> np.ndarray:
    """uint8 of the same shape: linear from the window's first value, 0, to its second, 255.

    window: as in DataConfig, from the experiment or the site and never from the pixels, so that one grey
    means the same in every image. whole: the range of the values' type, which window "full" takes.
    Raises ValueError without a window, saying which values are there.
    """
    found = f"{values.dtype} pixels from {np.nanmin(values):g} to {np.nanmax(values):g}"
    if window == "full" and whole is not None:
        window = whole
    if window is None or isinstance(window, str):
        full = f", or full for {whole[0]:g} to {whole[1]:g}" if whole is not None else ""
        raise ValueError(
            f"{found} need a window: set data.window to the values that become black and white, [low, high]"
            f"{full}"
        )
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ValueError(f"{found}, some of which are not finite")
    low, high = window
    scaled = (values.astype(np.float64) - low) * (255.0 / (high - low))
    return np.clip(np.rint(scaled), 0, 255).astype(np.uint8)


def chosen_frame(frame: Literal["first", "middle", "last"] | int | None, count: int) -> int:
    """Index of the frame that becomes the image. count: frames in the file.

    Raises ValueError if frame is None, or the file does not have this frame.
    """
    if frame is None:
        raise ValueError(
            f"holds {count} frames; say which one is the image in data.frame: a number, or middle"
        )
    index = {"first": 0, "middle": count // 2, "last": count - 1}[frame] if isinstance(frame, str) else frame
    if index >= count:
        raise ValueError(f"holds {count} frames, and data.frame asks for number {index}, counted from 0")
    return index
