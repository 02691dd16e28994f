"""DICOM files: their pixels as 8-bit arrays, and nothing else of what they say but whose they are, if asked.

Only the elements that pixels need are read (TAGS), so that no name or date of a patient is ever in memory,
and the number of a patient only where data.patient asks for it; errors name the file and what kind of thing
is wrong, and never quote an element.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perennial.data.config import DICOM_PATIENT as PATIENT
from perennial.data.config import Window
from perennial.foundation.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pydicom import Dataset

TAGS = (
    *(
        "SamplesPerPixel",
        "PhotometricInterpretation",
        "NumberOfFrames",
        "Rows",
        "Columns",
        "PlanarConfiguration",
    ),
    *("BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "PixelData", "FloatPixelData"),
    *("DoubleFloatPixelData", "RescaleSlope", "RescaleIntercept", "ModalityLUTSequence"),
    *("WindowCenter", "WindowWidth", "VOILUTFunction"),
    *("RedPaletteColorLookupTableDescriptor", "GreenPaletteColorLookupTableDescriptor"),
    *("BluePaletteColorLookupTableDescriptor", "RedPaletteColorLookupTableData"),
    *("GreenPaletteColorLookupTableData", "BluePaletteColorLookupTableData"),
)


COMPRESSED = "pip install 'perennial-fl[dicom-compressed]'"
"""The extra with a decoder for what pydicom and Pillow cannot decompress: lossless JPEG and JPEG-LS."""
DECODERS = ("pydicom", "pillow")
"""pydicom's plug-ins that go before all others, so that what else is installed moves no pixel."""


def read_dicom(path: Path, window: Window | None) -> np.ndarray:
    """uint8 (H, W) of a grey image, bright where the scanner showed it bright; (H, W, 3) of one in colour.

    window: None and "file" take the file's own; values are those of the modality, Hounsfield units for CT.
    Raises ValueError saying what cannot be used, and ConfigError without the extra `dicom`.
    """
    with _open_dicom(path, TAGS) as dataset:
        return _read_pixels(dataset, window)


def read_patient(path: Path) -> str:
    """The PatientID of a file, which the caller hashes and tells nobody.

    Raises DataError naming the file where it has none, and ConfigError without the extra `dicom`.
    """
    try:
        with _open_dicom(path, (PATIENT,), before_pixels=True) as dataset:
            found = str(dataset.get(PATIENT) or "").strip()
    except ValueError as error:
        raise DataError(f"{path}: data.patient: {PATIENT}: {error}") from None
    if not found:
        raise DataError(
            f"{path}: data.patient: {PATIENT}: the file has none; take `patient` out, or give a pattern for "
            "files' names"
        )
    return found


def read_shape(path: Path) -> tuple[tuple[int, int], bool]:
    """((width, height), whether it is seen by a window of its own, or needs none) of a file, without pixels.

    Raises ValueError where they cannot be read, and ConfigError without the extra `dicom`.
    """
    with _open_dicom(path, TAGS, before_pixels=True) as dataset:
        size = int(dataset.get("Columns") or 0), int(dataset.get("Rows") or 0)
        if not all(size):
            raise ValueError("does not say how many rows and columns it has")
        grey = str(dataset.get("PhotometricInterpretation", "MONOCHROME2")).startswith("MONOCHROME")
        try:
            seen = not grey or _choose_window(dataset, None) is not None
        except ValueError:
            seen = False
        return size, seen


@contextmanager
def _open_dicom(path: Path, tags: Sequence[str], *, before_pixels: bool = False) -> Iterator["Dataset"]:
    """These elements of a file, while nothing that pydicom warns of is told: its warnings quote elements."""
    try:
        import pydicom
        from pydicom.config import settings
    except ImportError as error:
        raise ConfigError(f"{path}: DICOM files need pydicom: pip install 'perennial-fl[dicom]'") from error
    settings.reading_validation_mode = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dataset = pydicom.dcmread(
                path, force=True, specific_tags=list(tags), stop_before_pixels=before_pixels
            )
        except Exception as error:
            raise ValueError(f"not a DICOM file that can be read ({type(error).__name__})") from None
        yield dataset


def _read_pixels(dataset: "Dataset", window: Window | None) -> np.ndarray:
    from pydicom.pixels.processing import apply_color_lut, apply_modality_lut

    if not any(key in dataset for key in ("PixelData", "FloatPixelData", "DoubleFloatPixelData")):
        raise ValueError("holds no image")
    kind = str(dataset.get("PhotometricInterpretation", "MONOCHROME2"))
    refuse_several(int(dataset.get("NumberOfFrames") or 1))
    values = _decode_frame(dataset)
    if kind == "PALETTE COLOR":
        colours = apply_color_lut(values, dataset)
        return scale_to_uint8(colours, "full", (0.0, 255.0 if colours.dtype == np.uint8 else 65535.0))
    if values.ndim == 3:
        whole = (0.0, float(2 ** int(dataset.BitsStored) - 1))
        return values if values.dtype == np.uint8 else scale_to_uint8(values, "full", whole)
    values = apply_modality_lut(values, dataset)
    grey = scale_to_uint8(values, _choose_window(dataset, window), _compute_range(dataset))
    return 255 - grey if kind == "MONOCHROME1" else grey


def _compute_range(dataset: "Dataset") -> tuple[float, float]:
    """The values that the stored bits can have, as the modality means them."""
    bits, signed = int(dataset.get("BitsStored", 16)), int(dataset.get("PixelRepresentation", 0))
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    slope, offset = float(dataset.get("RescaleSlope") or 1), float(dataset.get("RescaleIntercept") or 0)
    ends = sorted((low * slope + offset, high * slope + offset))
    return ends[0], ends[1]


def _choose_window(dataset: "Dataset", window: Window | None) -> Window:
    """The window of the settings, or the first of the file's own; 8-bit images without one are taken whole.

    The linear function of DICOM (PS3.3, C.11.2.1.2): width - 1 values from black to white.
    """
    if window not in (None, "file"):
        return window
    center, width = (_take_first(dataset.get(key)) for key in ("WindowCenter", "WindowWidth"))
    if center is not None and width is not None and width > 1:
        if str(dataset.get("VOILUTFunction", "LINEAR")) == "LINEAR_EXACT":
            return center - width / 2, center + width / 2
        return center - 0.5 - (width - 1) / 2, center - 0.5 + (width - 1) / 2
    if int(dataset.get("BitsStored", 16)) <= 8:
        return "full"
    raise ValueError(
        "the file has no window of its own; set data.window to the values that become black and white, "
        "[low, high] (Hounsfield units for CT), or full"
    )


def _take_first(value: Any) -> float | None:
    if value is None or value == "":
        return None
    return float(value[0] if hasattr(value, "__len__") and not isinstance(value, str) else value)


def _decode_frame(dataset: "Dataset") -> np.ndarray:
    """The pixels, decompressed; colours are RGB. Raises ValueError saying why they cannot be."""
    from pydicom.pixels.decoders.base import get_decoder
    from pydicom.pixels.utils import pixel_array

    syntax = getattr(getattr(dataset, "file_meta", None), "TransferSyntaxUID", None)
    if syntax is None:
        raise ValueError("does not say how its pixels are written (no transfer syntax)")
    if not syntax.is_encapsulated:
        return _read_array(lambda: pixel_array(dataset, index=0), "its pixels cannot be read")
    name = f"its pixels are compressed as {syntax.name} ({syntax})"
    try:
        available = get_decoder(syntax).available_plugins
    except NotImplementedError:
        raise ValueError(
            f"{name}, which cannot be decompressed here; write the file anew without it"
        ) from None
    # a plug-in that cannot do this file, such as Pillow with 12-bit JPEG, leaves it to the next one
    *earlier, last = sorted(available, key=lambda plugin: plugin not in DECODERS) or [""]
    if not last:
        raise ValueError(f"{name}, for which no decoder is installed: {COMPRESSED}, or decompress the file")
    for plugin in earlier:
        with suppress(Exception):
            return pixel_array(dataset, index=0, decoding_plugin=plugin)
    remedy = "damaged" if set(available) - {*DECODERS} else f"damaged, or wants another decoder: {COMPRESSED}"
    return _read_array(lambda: pixel_array(dataset, index=0, decoding_plugin=last), f"{name}; {remedy}")


def _read_array(read: Callable[[], np.ndarray], otherwise: str) -> np.ndarray:
    try:
        return read()
    except Exception as error:
        raise ValueError(f"{otherwise} ({type(error).__name__})") from None


def find_full_range(dtype: np.dtype) -> tuple[float, float] | None:
    """(least, greatest) value of an integer type; None for floats, which have no full range."""
    if dtype.kind not in "iu":
        return None
    limits = np.iinfo(dtype)
    return float(limits.min), float(limits.max)


def scale_to_uint8(
    values: np.ndarray, window: Window | None, whole: tuple[float, float] | None
) -> np.ndarray:
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


def refuse_several(frames: int) -> None:
    """Raise ValueError for a file that holds several images."""
    if frames > 1:
        raise ValueError(f"holds {frames} frames; make a file of the one that is the image")
