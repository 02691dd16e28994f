"""Images in class folders, or named by a CSV manifest.

A site's root holds one folder a class, and images at any depth inside; or `train` and `test`, each with
class folders. With a natural partition, the path holds one such root a site. Links to files and folders are
followed. DICOM files need no suffix. A manifest is a CSV file with columns path (relative to the manifest),
label, and optionally site and split ("train" or "test").
"""

import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from perennial.data.config import DICOM_PATIENT, DataConfig, compile_patient_pattern
from perennial.data.csv_file import read_csv
from perennial.data.images import DICOM_SUFFIXES, ImageReading, is_dicom, read_cached_images
from perennial.data.labels import assign_classes, encode_labels
from perennial.data.samples import Samples, Source, choose_constants, find_subgroups
from perennial.data.splits import group_by_patient
from perennial.data.table_columns import MISSING
from perennial.foundation.errors import DataError, suggest_nearest

SUFFIXES = frozenset(
    (
        ".png",
        ".jpg",
        ".jpeg",
        ".jpe",
        ".bmp",
        ".gif",
        ".tif",
        ".tiff",
        ".webp",
        ".ppm",
        ".pgm",
        ".pbm",
        ".jp2",
        *DICOM_SUFFIXES,
    )
)

# Parts of a data set, by the names that people give them.
_SPLITS = frozenset(("train", "training", "test", "testing", "val", "valid", "validation", "dev"))


@dataclass
class _Listing:
    """Image files in a deterministic order, with the label, site and split of each."""

    root: Path
    paths: list[Path] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)
    is_test: list[bool] = field(default_factory=list)
    patients: list[str] = field(default_factory=list)
    subgroups: list[str] = field(default_factory=list)
    folders: dict[str, Path] = field(default_factory=dict)
    ignored: list[Path] = field(default_factory=list)
    stray: list[Path] = field(default_factory=list)
    looped: list[Path] = field(default_factory=list)
    hidden: list[Path] = field(default_factory=list)
    empty: list[Path] = field(default_factory=list)
    inner: list[Path] = field(default_factory=list)
    """Class folders all of whose images lie in folders of their own, whose names mean nothing."""

    def keep(self, rows: Sequence[int]) -> None:
        """Remove all images but those at these indices."""
        if len(rows) == len(self.paths):
            return
        for name in ("paths", "labels", "sites", "is_test", "patients", "subgroups"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in rows] if values else values)


LEFT_BY_PROGRAMS = frozenset(
    ("__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found")
)
"""Folders that archives and file servers leave beside one's own; `.` begins the names of others."""


def is_hidden(name: str) -> bool:
    """Whether a folder of this name is skipped: it is hidden, or some program's own."""
    return name.startswith(".") or name in LEFT_BY_PROGRAMS


def load_folder(config: DataConfig, cache: Path | None = None) -> Source:
    """uint8 (N, C, H, W), in the sorted order of paths, "rgb" unless the experiment says "gray".

    cache: a private folder that keeps decoded pixels between processes.
    Raises DataError naming the folder or files that cannot be used, or a label outside the registry.
    """
    assert config.path is not None
    root = Path(config.path).expanduser()
    if root.suffix.lower() == ".csv":
        listing, lines = _read_manifest(root, config)
        y, classes = encode_labels(
            np.array(listing.labels),
            config.classes,
            config.labels,
            lambda row: f"{root}, line {lines[row]}",
            MISSING,
        )
    else:
        known = {*(config.classes or ()), *(config.labels or {})}
        listing = _scan_tree(root, config.partition.kind == "natural", known)
        names, indices = list(listing.folders), list(listing.folders.values())
        index, classes = assign_classes(names, config.classes, config.labels, lambda i: str(indices[i]))
        of_name = dict(zip(names, index.tolist(), strict=True))
        y = np.array([of_name[label] for label in listing.labels], dtype=np.int64)
        if config.patient not in (None, DICOM_PATIENT):
            listing.patients = [_find_patient(path, config.patient) for path in listing.paths]
    if not listing.paths:
        raise DataError(f"{root}: no image in it; expected {root.name}/<class>/<image>")
    read = read_cached_images(cache, listing.paths, ImageReading.of(config))
    listing.keep(read.rows.tolist())
    if config.patient == DICOM_PATIENT and root.suffix.lower() != ".csv":
        listing.patients = _read_patients(listing.paths)
    return _build_source(
        config, listing, torch.from_numpy(read.x), torch.from_numpy(y[read.rows]), classes, read.notes
    )


def _build_source(
    config: DataConfig,
    listing: _Listing,
    x: torch.Tensor,
    y: torch.Tensor,
    classes: tuple[str, ...],
    notes_on_images: tuple[str, ...],
) -> Source:
    site_names = tuple(dict.fromkeys(listing.sites))
    position = {name: index for index, name in enumerate(site_names)}
    site = torch.tensor([position[name] for name in listing.sites]) if site_names else None
    keys = tuple(
        str(path.relative_to(listing.root)) if path.is_relative_to(listing.root) else str(path)
        for path in listing.paths
    )
    groups = None
    if listing.patients:
        groups = group_by_patient(listing.patients, lambda row: str(listing.paths[row]), MISSING)
    if config.subgroup is not None and not listing.subgroups:
        raise DataError(f"{listing.root}: data.subgroup is a column; class folders have none: use a manifest")
    subgroup = find_subgroups(listing.subgroups, config)
    everything = Samples(x, y, site, site_names, keys, groups, groups is not None, subgroup)
    is_test = torch.tensor(listing.is_test)
    train = everything.pick(torch.nonzero(~is_test).squeeze(1)) if is_test.any() else everything
    test = everything.pick(torch.nonzero(is_test).squeeze(1)) if is_test.any() else None
    notes = [*notes_on_images, *(f"{folder}: the class folder is empty" for folder in listing.empty)]
    left_out = {
        "files without an image suffix": listing.ignored,
        "images outside of the class folders": listing.stray,
        "links to a folder around them": listing.looped,
        "hidden folders, or folders that archives leave,": listing.hidden,
    }
    notes += [
        f"{listing.root}: {len(paths)} {what} left out, the first {min(paths)}"
        for what, paths in left_out.items()
        if paths
    ]
    if len(listing.inner) == len(listing.folders) > 1:
        shown = ", ".join(folder.name for folder in listing.inner[:4])
        shown += ", ..." if listing.inner[4:] else ""
        notes.append(
            f"{listing.root}: images in folders inside {shown} are of that class; if the first folders are "
            "sites: partition: {kind: natural}"
        )
    return Source(train, test, classes, *choose_constants(config.normalise, x), notes=tuple(notes))


def _scan_tree(root: Path, natural: bool, known: Collection[str]) -> _Listing:
    """What lies below the root of a data set: its class folders, or parts with class folders inside.

    known: names that are classes, whatever else they could mean.
    """
    listing = _Listing(root)
    for site_root in _list_folders(root, listing) if natural else [root]:
        parts = _list_folders(site_root, listing)
        names = {folder.name for folder in parts}
        split = names == {"train", "test"}
        if not split and names and names <= _SPLITS - set(known):
            raise DataError(
                f"{site_root}: holds {', '.join(sorted(names))}, which are parts and no classes; expected "
                "class folders, or exactly train and test with class folders inside. Validation samples are "
                "taken from train (data.validation_fraction)"
            )
        for part in parts if split else [site_root]:
            for class_folder in _list_folders(part, listing) if split else parts:
                listing.folders.setdefault(class_folder.name, class_folder)
                images = [path for path in _walk_folder(class_folder, listing) if _is_image(path, listing)]
                if not images:
                    listing.empty.append(class_folder)
                listing.paths += images
                if images and all(path.parent != class_folder for path in images):
                    listing.inner.append(class_folder)
                listing.labels += [class_folder.name] * len(images)
                listing.is_test += [split and part.name == "test"] * len(images)
                listing.sites += [site_root.name] * len(images) if natural else []
    if not listing.folders:
        shape = "<site>/<class>/<image>" if natural else "<class>/<image>"
        raise DataError(f"{root}: no class folder in it; expected {root.name}/{shape}")
    return listing


def _list_folders(folder: Path, listing: _Listing) -> list[Path]:
    """Folders inside folder, sorted by name; images beside them are strays, and hidden ones do not count."""
    try:
        with os.scandir(folder) as entries:
            every = [(Path(entry.path), entry.is_dir()) for entry in entries]
    except OSError as error:
        raise DataError(f"{folder}: the folder cannot be read ({error.strerror})") from error
    listing.hidden += [path for path, is_folder in every if is_folder and is_hidden(path.name)]
    found = [(path, is_folder) for path, is_folder in every if not is_hidden(path.name)]
    folders = [path for path, is_folder in found if is_folder]
    listing.stray += [path for path, is_folder in found if not is_folder and _has_suffix(path)]
    for path in folders:
        if not _is_text(path.name):
            shown = os.fsencode(path).decode("utf-8", "backslashreplace")
            raise DataError(f"{shown}: the folder's name is not text in UTF-8; rename it")
    return sorted(folders)


def _read_patients(paths: Sequence[Path]) -> list[str]:
    """Whose each DICOM file is. Raises DataError naming a file that is none, or has no patient."""
    from perennial.data.dicom import read_patient

    for path in paths:
        if not is_dicom(path):
            raise DataError(
                f"{path}: data.patient: {DICOM_PATIENT} is an element of DICOM files, and this is none"
            )
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(read_patient, paths))


def _find_patient(path: Path, pattern: str) -> str:
    found = compile_patient_pattern(pattern).search(path.name)
    if found is None or not found[1]:
        raise DataError(
            f"{path}: data.patient {pattern!r} finds no patient in the file's name; every image needs one"
        )
    return found[1]


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _walk_folder(folder: Path, listing: _Listing) -> Iterator[Path]:
    """Yield the files inside a folder, at any depth, in a fixed order and each folder once.

    A folder's own files come first, then those of linked folders. A link to a folder that contains the link
    would bring in other classes; it is added to listing.looped instead.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: the folder cannot be read ({error.strerror})") from error

    return walk_files(folder, refuse, listing.looped.append, listing.hidden.append)


def walk_files(
    folder: Path,
    refuse: Callable[[OSError], None],
    looped: Callable[[Path], None],
    left_out: Callable[[Path], None],
) -> Iterator[Path]:
    """Yield the files inside a folder and its subfolders, sorted by folder and name, following links.

    refuse: called with the error of what cannot be read. looped: with each link to a folder around it,
    left_out: with each hidden folder; both are skipped.
    """
    seen: set[Path] = set()
    waiting = deque([folder])
    while waiting:
        for place, folders, files in os.walk(waiting.popleft(), onerror=refuse):
            here = Path(place).resolve()
            if here in seen:
                folders.clear()
                continue
            seen.add(here)
            for name in filter(is_hidden, folders):
                left_out(Path(place, name))
            folders[:] = sorted(name for name in folders if not is_hidden(name))
            for link in filter(os.path.islink, (Path(place, name) for name in folders)):
                around = here.is_relative_to(link.resolve())
                if around:
                    looped(link)
                else:
                    waiting.append(link)
            yield from (Path(place, name) for name in sorted(files) if not name.startswith("."))


def _is_image(path: Path, listing: _Listing) -> bool:
    if _has_suffix(path) or is_dicom(path):
        return True
    listing.ignored.append(path)
    return False


def _has_suffix(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def _read_manifest(path: Path, config: DataConfig) -> tuple[_Listing, list[int]]:
    """The images that a manifest names, and the line of each."""
    file, patient = read_csv(path), config.patient
    columns, lines = file.columns, file.lines
    apart = config.subgroup.column if config.subgroup is not None else None
    for name in filter(None, ("path", "label", patient, apart)):
        if name not in columns:
            raise DataError(f"{path}: a manifest needs the column {name!r}{suggest_nearest(name, columns)}")
    listing = _Listing(path.parent)
    listing.paths = [path.parent / name for name in columns["path"].tolist()]
    listing.labels = columns["label"].tolist()
    listing.patients = [] if patient is None else columns[patient].tolist()
    listing.subgroups = [] if apart is None else columns[apart].tolist()
    listing.sites = columns["site"].tolist() if "site" in columns else []
    split = columns.get("split", np.full(len(lines), "train"))
    for name, values in (("site", listing.sites), ("path", columns["path"].tolist())):
        if "" in values:
            raise DataError(f"{path}, line {lines[values.index('')]}: the {name} is empty")
    odd = np.flatnonzero((split != "train") & (split != "test"))
    if len(odd):
        raise DataError(f"{path}, line {lines[odd[0]]}: split {str(split[odd[0]])!r} must be train or test")
    listing.is_test = (split == "test").tolist()
    return listing, lines
