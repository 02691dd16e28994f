"""DICOM files: their pixels as 8-bit arrays, and nothing else of what they say.

Only the elements that pixels need are read (TAGS), so that no name, number or date of a patient is ever in
memory; errors name the file and what kind of thing is wrong, and never quote an element.
"""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perennial.data.config import Window
from perennial.data.windows import chosen_frame, eight_bits
from perennial.foundation.errors import ConfigError

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


def read_dicom(path: Path, window: Window | None, frame: Any) -> np.ndarray:
    """uint8 (H, W) of a grey image, bright where the scanner showed it bright; (H, W, 3) of one in colour.

    window: None and "file" take the file's own; values are those of the modality, Hounsfield units for CT.
    frame: which one of several; without it such a file is refused.
    Raises ValueError saying what cannot be used, and ConfigError without the extra `dicom`.
    """
    try:
        import pydicom
        from pydicom.config import settings
    except ImportError as error:
        raise ConfigError(f"{path}: DICOM files need pydicom: pip install 'perennial[dicom]'") from error
    settings.reading_validation_mode = 0
    with warnings.catch_warnings():
        # pydicom's warnings quote what stands in a file
        warnings.simplefilter("ignore")
        try:
            dataset = pydicom.dcmread(path, force=True, specific_tags=list(TAGS))
        except Exception as error:
            raise ValueError(f"not a DICOM file that can be read ({type(error).__name__})") from None
        return _pixels(dataset, window, frame)


def _pixels(dataset: "Dataset", window: Window | None, frame: Any) -> np.ndarray:
    from pydicom.pixels.processing import apply_color_lut, apply_modality_lut, convert_color_space

    if not any(key in dataset for key in ("PixelData", "FloatPixelData", "DoubleFloatPixelData")):
        raise ValueError("holds no image")
    kind = str(dataset.get("PhotometricInterpretation", "MONOCHROME2"))
    frames = int(dataset.get("NumberOfFrames") or 1)
    index = chosen_frame(frame, frames) if frames > 1 else 0
    try:
        values = dataset.pixel_array
    except Exception as error:
        raise ValueError(_why_not(dataset, error)) from None
    values = values[index] if frames > 1 else values
    if kind == "PALETTE COLOR":
        colours = apply_color_lut(values, dataset)
        return eight_bits(colours, "full", (0.0, 255.0 if colours.dtype == np.uint8 else 65535.0))
    if values.ndim == 3:
        # pydicom's plug-ins give decompressed colours as RGB already
        if kind.startswith("YBR_FULL") and not dataset.file_meta.TransferSyntaxUID.is_compressed:
            values = convert_color_space(values, kind, "RGB")
        whole = (0.0, float(2 ** int(dataset.BitsStored) - 1))
        return values if values.dtype == np.uint8 else eight_bits(values, "full", whole)
    values = apply_modality_lut(values, dataset)
    grey = eight_bits(values, _window(dataset, window), _whole(dataset))
    return 255 - grey if kind == "MONOCHROME1" else grey


def _whole(dataset: "Dataset") -> tuple[float, float]:
    """The values that the stored bits can have, as the modality means them."""
    bits, signed = int(dataset.get("BitsStored", 16)), int(dataset.get("PixelRepresentation", 0))
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    slope, offset = float(dataset.get("RescaleSlope") or 1), float(dataset.get("RescaleIntercept") or 0)
    ends = sorted((low * slope + offset, high * slope + offset))
    return ends[0], ends[1]


def _window(dataset: "Dataset", window: Window | None) -> Window:
    """The window of the settings, or the first of the file's own; 8-bit images without one are taken whole.

    The linear function of DICOM (PS3.3, C.11.2.1.2): width - 1 values from black to white.
    """
    if window not in (None, "file"):
        return window
    center, width = (_first(dataset.get(key)) for key in ("WindowCenter", "WindowWidth"))
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


def _first(value: Any) -> float | None:
    if value is None or value == "":
        return None
    return float(value[0] if hasattr(value, "__len__") and not isinstance(value, str) else value)


def _why_not(dataset: "Dataset", error: Exception) -> str:
    syntax = getattr(getattr(dataset, "file_meta", None), "TransferSyntaxUID", None)
    if syntax is not None and syntax.is_compressed:
        return (
            f"its pixels are compressed ({syntax.name}), for which no decoder is installed or which "
            f"is damaged; "
            "pip install python-gdcm, or decompress the file"
        )
    return f"its pixels cannot be read ({type(error).__name__})"
