"""Files that a person names, with those inside of folders."""

from collections.abc import Sequence
from pathlib import Path

from perennial.data.folder import SUFFIXES
from perennial.data.images import is_dicom
from perennial.foundation.errors import DataError

TABLES = frozenset({".csv", ".npz"})


def files_in(paths: Sequence[Path], *, of_images: bool) -> list[Path]:
    """The paths, with each folder replaced by the files inside it that a model can read, sorted by name.

    of_images: whether the model takes images; else tables and arrays are read. Hidden files do not count.
    Raises DataError naming a path that is not there, or a folder without such a file.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: no such file or folder")
        if not path.is_dir():
            found.append(path)
            continue
        wanted = (SUFFIXES | {".npz"}) if of_images else TABLES
        inside = sorted(
            file
            for file in path.rglob("*")
            if not _hidden(file.relative_to(path))
            and file.is_file()
            and (file.suffix.lower() in wanted or (of_images and is_dicom(file)))
        )
        if not inside:
            raise DataError(
                f"{path}: no {'image' if of_images else 'table'} in this folder; allowed: {_words(wanted)}"
            )
        found += inside
    return found


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _words(suffixes: frozenset[str]) -> str:
    return ", ".join(sorted(suffixes))
