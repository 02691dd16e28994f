"""Datasets as researchers have them, as the arrays of `Source.of`; by duck type, without their packages."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from perennial.foundation.errors import DataError, clean_text

_TAKEN = (
    "a torchvision-style dataset, a TensorDataset, a Hugging Face Dataset, a list of (image, label), or "
    "arrays x and y"
)
_LABELS, _SAMPLES = ("label", "labels", "target", "class", "y"), ("image", "img", "images", "x", "features")
"""Names of columns of a Hugging Face Dataset, tried in this order."""


def extract_arrays(dataset: Any) -> dict[str, Any]:
    """x, y and, where the dataset names them, classes.

    Args:
        dataset: a TensorDataset of two tensors; a Hugging Face Dataset with a column of labels and one of
            images or vectors; anything else with a length whose items are (sample, label), as torchvision's
            datasets and lists. A sample is a PIL image, an array or a tensor.

    Raises:
        DataError: names what was found and what is taken.
    """
    tensors = getattr(dataset, "tensors", None)
    if isinstance(tensors, tuple):
        if len(tensors) != 2:
            raise DataError(f"Source.of: found a TensorDataset of {len(tensors)} tensors, allowed 2: x and y")
        return {"x": _restore_pixels(_to_array(tensors[0])), "y": _to_array(tensors[1])}
    if isinstance(dataset, Mapping):
        parts = ", ".join(clean_text(str(part), 30) for part in list(dataset)[:5])
        raise DataError(
            f"Source.of: found {type(dataset).__name__} of {parts}; choose one of its parts, as in "
            "dataset['train'], or give arrays as Source.of(x, y)"
        )
    if hasattr(dataset, "column_names") and hasattr(dataset, "features"):
        return _of_columns(dataset)
    if (
        isinstance(dataset, str | bytes)
        or not hasattr(dataset, "__getitem__")
        or not hasattr(dataset, "__len__")
    ):
        raise DataError(
            f"Source.of: found {type(dataset).__name__} {clean_text(repr(dataset), 60)}, allowed {_TAKEN}"
        )
    samples, labels = [], []
    for place in range(len(dataset)):
        item = dataset[place]
        if not isinstance(item, Sequence) or isinstance(item, str) or len(item) != 2:
            raise DataError(
                f"Source.of: item {place} is {type(item).__name__} {clean_text(repr(item), 60)}, "
                f"allowed a pair (sample, label); taken are {_TAKEN}"
            )
        samples.append(item[0])
        labels.append(item[1])
    return _combine_samples(samples, labels, getattr(dataset, "classes", None))


def _of_columns(dataset: Any) -> dict[str, Any]:
    columns = [*dataset.column_names]
    named = [column for column in columns if hasattr(dataset.features[column], "names")]
    label = next((name for name in (*named, *_LABELS) if name in columns), None)
    sample = next((name for name in _SAMPLES if name in columns and name != label), None)
    if label is None or sample is None:
        raise DataError(
            f"Source.of: found a Dataset with the columns {', '.join(columns)}, allowed one of labels "
            f"({', '.join(_LABELS)}, or of type ClassLabel) and one of samples ({', '.join(_SAMPLES)}); "
            "rename_column gives them these names"
        )
    names = getattr(dataset.features[label], "names", None)
    return _combine_samples([*dataset[sample]], [*dataset[label]], names)


def _combine_samples(samples: list[Any], labels: list[Any], classes: Iterable[Any] | None) -> dict[str, Any]:
    arrays = [_to_array(sample) for sample in samples]
    for place, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise DataError(
                f"Source.of: sample {place} has shape {array.shape}, sample 0 has {arrays[0].shape}; allowed "
                "samples of one shape: resize them first, or give the folder of files to `perennial init`"
            )
    y = np.asarray(
        [label.item() if np.size(label) == 1 and hasattr(label, "item") else label for label in labels]
    )
    if y.ndim != 1:
        raise DataError(f"Source.of: labels have shape {y.shape}, allowed one number or name for each sample")
    found: dict[str, Any] = {"x": _restore_pixels(np.stack(arrays) if arrays else np.empty(0)), "y": y}
    if classes is not None and y.dtype.kind in "iu":
        found["classes"] = [str(name) for name in classes]
    return found


def _to_array(value: Any) -> np.ndarray:
    """A PIL image, tensor or array as an array."""
    array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    if array.dtype == object or array.dtype.kind in "USO":
        raise DataError(
            f"Source.of: a sample is {type(value).__name__} {clean_text(repr(value), 60)}, allowed a "
            "PIL image, an array or a tensor of numbers"
        )
    return array


def _restore_pixels(x: np.ndarray) -> np.ndarray:
    """Images as 8-bit pixels again, where they are these divided by 255, as ToTensor makes them."""
    if not len(x):
        raise DataError("Source.of: found a dataset without samples, allowed one sample or more")
    if x.ndim < 3 or x.dtype == np.uint8:
        return x
    scaled = np.rint(255 * x.astype(np.float64))
    if x.min() < 0 or x.max() > 1 or np.abs(scaled / 255 - x).max() > 1e-5:
        raise DataError(
            f"Source.of: found images of type {x.dtype} from {x.min():g} to {x.max():g}, allowed uint8, or "
            "uint8 divided by 255 as ToTensor makes them; leave Normalize and augmentation out, which "
            "`data.normalise` and `data.augmentation` do"
        )
    return scaled.astype(np.uint8)
