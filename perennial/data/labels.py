"""Maps the labels that a data owner writes to the classes of the registry."""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from perennial.foundation.errors import ConfigError, DataError, suggest_nearest

MOST_NAMED = 12


def assign_classes(
    found: Sequence[str],
    registry: Sequence[str] | None,
    renamed: Mapping[str, str] | None,
    where: Callable[[int], str],
) -> tuple[np.ndarray, tuple[str, ...]]:
    """(class index of each distinct label text, class names).

    found: the texts. registry: the class names; None takes those found, numbers first, then texts.
    renamed: a site's own label -> class. where(i): the file, row or folder in which found[i] stands.
    Raises DataError on a label outside the registry, ConfigError on a renaming to outside of it.
    """
    renamed = renamed or {}
    names = [renamed.get(text, text) for text in found]
    classes = tuple(registry) if registry is not None else tuple(sorted(set(names), key=_rank_name))
    position = {name: index for index, name in enumerate(classes)}
    for local, name in renamed.items():
        if name not in position:
            raise ConfigError(
                f"data.labels: {local!r} becomes {name!r}, which is no "
                f"class{suggest_nearest(name, position)}; classes: {format_names(classes)}"
            )
    for index, name in enumerate(names):
        if name not in position:
            raise DataError(
                f"{where(index)}: label {name!r} is not in the registry"
                f"{suggest_nearest(name, [*position, *renamed])}; classes: {format_names(classes)}. "
                "A site's own label becomes a class through data.labels"
            )
    return np.array([position[name] for name in names], dtype=np.int64), classes


def encode_labels(
    texts: np.ndarray,
    registry: Sequence[str] | None,
    renamed: Mapping[str, str] | None,
    where: Callable[[int], str],
    missing: Collection[str] = ("",),
) -> tuple[np.ndarray, tuple[str, ...]]:
    """(class index of each row, class names) of (N,) label texts; where(row) names the file and row.

    registry, renamed: as in assign_classes(). missing: texts that mean no label, unless registry or renamed
    name them.
    Raises as assign_classes() does, and DataError on a missing label.
    """
    found, first, row_value = np.unique(texts, return_index=True, return_inverse=True)
    for text, row in zip(found.tolist(), first.tolist(), strict=True):
        if text in missing and text not in (registry or ()) and text not in (renamed or {}):
            hint = f", {text!r}; if that is a class, list it in data.classes" if text else ""
            raise DataError(f"{where(row)}: the label is empty{hint}")
    indices, classes = assign_classes(found.tolist(), registry, renamed, lambda i: where(int(first[i])))
    return indices[row_value], classes


def _rank_name(name: str) -> tuple[int, int, str]:
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)


def format_names(names: Sequence[str]) -> str:
    """The first MOST_NAMED names as a text, with "and N more" if there are others."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def list_empty_classes(labels: np.ndarray, classes: Sequence[str]) -> list[str]:
    """Names of the classes that do not occur in labels, (n,) int64."""
    counts = np.bincount(labels, minlength=len(classes))
    return [name for name, count in zip(classes, counts, strict=True) if count == 0]
