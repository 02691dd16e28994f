"""A first look at somebody's data: what it is, how it is laid out, and what it needs to be read."""

import os
import re
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from perennial.data.config import DICOM_PATIENT
from perennial.data.csv_file import CsvFile, Decimal, read_csv
from perennial.data.folder import SUFFIXES, walk_files
from perennial.data.image_survey import Survey, have_patients, survey_images
from perennial.data.images import is_dicom
from perennial.data.refused import (
    find_volume_format,
    follow_up,
    refuse_foreign_format,
    require_classes,
)
from perennial.data.suspicion import (
    Suspicion,
    ask_about_cells,
    ask_about_numbers,
    ask_whose,
    find_words,
    has_decimals,
    inspect_names,
    inspect_table,
    is_identifier,
    is_repeated_identifier,
    read_as_answered,
)
from perennial.data.table_columns import describe_groups, discover, mask_missing
from perennial.foundation.errors import DataError

LABELS = ("label", "class", "diagnosis", "diagnose", "dx", "target", "outcome", "disease", "y")
SITES = ("site", "hospital", "clinic", "centre", "center", "institution", "klinik", "ward")
PATIENTS = (
    "patient",
    "patient_id",
    "patientid",
    "subject",
    "subject_id",
    "mrn",
    "lesion",
    "lesion_id",
    "case_id",
)
PATIENT_PATTERNS = (r"^([A-Za-z]*\d+)[_-]", r"^([A-Za-z]+[_-]\d+)[_-]", r"^(.+)[_-][A-Za-z]*\d+\.\w+$")
MOST_CLASSES = 200
PARTS = {"train", "test"}


Layout = Literal["class", "site/class"]
"""What the levels of a folder of images are: classes with anything inside, or sites that hold classes."""


class TwoLevels(DataError):
    """A folder whose first level could be sites or classes. below: folder -> folders inside it."""

    def __init__(self, root: Path, below: dict[str, list[str]]) -> None:
        self.below = below
        held = "; ".join(f"{name}/ holds {', '.join(inner[:4]) or 'images'}" for name, inner in below.items())
        super().__init__(
            f"{root}: what are the first folders? {held[:300]}. Sites that hold different classes look like "
            "classes with folders inside. Say --layout site/class or --layout class"
        )


def survey(
    path: Path,
    label: str | None = None,
    site: str | None = None,
    patient: str | None = None,
    layout: Layout | None = None,
    missing: Sequence[str] = (),
    decimal: Decimal | None = None,
    units: Mapping[str, str] | None = None,
    limits: Sequence[str] = (),
) -> Survey:
    """Look at a folder of images, a CSV file (a table, or a manifest of images), or an .npz file.

    label, site, patient: columns of a table, where they are not called as such columns usually are.
    layout: what the levels of a folder are; None: as they are, where that is clear.
    missing, decimal, units, limits: of a table, as in DataConfig.
    Raises TwoLevels where a folder has two levels that could be either, DataError saying what was found and
    what is expected.
    """
    path = Path(os.path.abspath(path.expanduser()))
    if path.is_dir():
        return _survey_folder(path, patient, layout)
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    refuse_foreign_format(path)
    if path.suffix.lower() == ".npz":
        return _survey_npz(path)
    file = read_csv(path, decimal=decimal, units=units, limits=limits)
    if {"path", "label"} <= file.columns.keys():
        return _survey_manifest(file, patient)
    questions = ask_about_numbers(file, missing)
    for each in questions:
        # looked at as if the answer were yes, which the file says only after somebody gave it
        file = read_as_answered(file, each)
    found = _survey_table(file, label, site, patient, missing)
    # under a protection a site has to state it where it could be either
    stated = decimal or (file.decimal if file.separator in (";", "\t") else None)
    said = {"missing": [*missing], "decimal": stated, "units": dict(units or {}), "limits": [*limits]}
    return replace(
        found,
        options=found.options | {key: value for key, value in said.items() if value},
        questions=(*questions, *found.questions),
    )


def _survey_folder(root: Path, patient: str | None, layout: Layout | None) -> Survey:
    """Images below class folders, or class folders below folders of parts or of sites."""
    left_out = list[Path]()
    files = [*_walk_images(root, left_out)]
    if not files:
        if kind := find_volume_format(root):
            raise DataError(
                f"{root}: no image in it, but volumes in {kind}, which are not read; write the slices that "
                "matter as PNG or DICOM into class folders"
            )
        raise DataError(
            f"{root}: no image in it; expected {root.name}/<class>/<image>, or "
            f"{root.name}/<site>/<class>/<image>"
        )
    parts = [path.relative_to(root).parts for path in files]
    if min(map(len, parts)) < 2:
        loose = next(path for path, names in zip(files, parts, strict=True) if len(names) < 2)
        raise DataError(
            f"{loose}: an image outside of class folders; expected {root.name}/<class>/<image>. "
            f"Where a table "
            "says what each image shows, give that table: a CSV file with the columns path and label"
        )
    top = {names[0] for names in parts}
    below: defaultdict[str, set[str]] = defaultdict(set)
    for names in parts:
        if len(names) > 2:
            below[names[0]].add(names[1])
    natural = layout == "site/class" or (layout is None and _has_site_folders(top, below))
    within = set[str]().union(*below.values())
    if layout is None and not natural and top != PARTS and within and not within <= PARTS:
        raise TwoLevels(root, {name: sorted(below[name]) for name in sorted(top)})
    level = 1 if natural or top == PARTS else 0
    if natural and within == PARTS:
        level = 2
    if loose := [path for path, names in zip(files, parts, strict=True) if len(names) < level + 2]:
        raise DataError(
            f"{loose[0]}: an image outside of class folders; expected {root.name}/<site>/<class>/<image>"
        )
    deeper = sorted({"/".join(names[: level + 1]) for names in parts if len(names) > level + 2})
    notes = ["train and test are used as they are"] if top == PARTS else []
    if left_out:
        notes.append(
            f"{len(left_out)} hidden folders, or folders that archives leave, are left out, the first "
            f"{min(left_out)}; rename it if it is yours"
        )
    if natural and layout is None:
        shown = ", ".join(sorted(top)[:6])
        notes.append(
            f"{shown} are taken for sites, as most of their folders share names; else --layout class"
        )
    if deeper:
        shown = ", ".join(deeper[:3]) + (", ..." if deeper[3:] else "")
        notes.append(f"folders inside {shown} name nothing here: their images are of the class around them")
    samples = Counter(names[level] for names in parts)
    sites = Counter(names[0] for names in parts) if natural else Counter[str]()
    if len(samples) > MOST_CLASSES:
        raise DataError(f"{root}: {len(samples)} folders that would be classes; expected <class>/<image>")
    names = [path.name for path in files]
    if patient is None and have_patients(files):
        patient = DICOM_PATIENT
    guess = patient or _guess_patient_pattern(names, len(samples))
    return survey_images(
        files,
        Survey(
            "folder",
            root,
            dict(sorted(samples.items())),
            dict(sorted(sites.items())),
            patient=patient,
            patient_guess=None if patient else guess,
            notes=tuple(notes),
        ),
    )


def _has_site_folders(top: set[str], below: dict[str, set[str]]) -> bool:
    """Whether the first level names sites: most second-level names occur below several of its folders."""
    if top == PARTS or set(below) != top or len(top) < 2:
        return False
    counts = Counter(name for names in below.values() for name in names)
    return sum(count > 1 for count in counts.values()) >= max(2, len(counts) / 2)


def _walk_images(root: Path, left_out: list[Path]) -> Iterable[Path]:
    def skip(_: object) -> None:
        """What cannot be read or goes round in circles is for `check` to name."""

    for path in walk_files(root, skip, skip, left_out.append):
        if path.suffix.lower() in SUFFIXES or is_dicom(path):
            yield path


def _guess_patient_pattern(names: Sequence[str], classes: int) -> str | None:
    """A pattern by which file names fall into groups that look like patients; None without one."""
    for pattern in PATIENT_PATTERNS:
        found = [re.search(pattern, name) for name in names]
        groups = {match[1] for match in found if match is not None}
        if None not in found and max(4, classes) < len(groups) < 0.95 * len(names):
            return pattern
    return None


def _survey_manifest(file: CsvFile, patient: str | None) -> Survey:
    patient = patient or _find_column(PATIENTS, file.columns)
    sites = Counter(file.columns["site"].tolist()) if "site" in file.columns else Counter[str]()
    return survey_images(
        [file.path.parent / name for name in file.columns["path"].tolist()],
        Survey(
            "folder",
            file.path,
            dict(sorted(Counter(file.columns["label"].tolist()).items())),
            dict(sorted(sites.items())),
            patient=patient,
            notes=file.notes,
        ),
    )


def _find_column(names: Sequence[str], columns: Iterable[str]) -> str | None:
    found = {name.lower().replace(" ", "_"): name for name in columns}
    return next((found[name] for name in names if name in found), None)


def _survey_table(
    file: CsvFile, label: str | None, site: str | None, patient: str | None, missing: Sequence[str]
) -> Survey:
    label, site, patient = (
        given or _find_column(names, file.columns)
        for given, names in ((label, LABELS), (site, SITES), (patient, PATIENTS))
    )
    if label is None:
        raise DataError(
            f"{file.path}: which column is the class? found {', '.join(file.columns)}; say so with "
            f"--label COLUMN"
        )
    for name in (label, site, patient):
        if name is not None and name not in file.columns:
            raise DataError(f"{file.path}: no column {name!r}; found {', '.join(file.columns)}")
    labels = file.columns[label]
    samples = Counter(labels[~mask_missing(labels, missing)].tolist())
    require_classes(str(file.path), label, [*samples], MOST_CLASSES)
    columns: dict[str, Any] = {}
    codes, ignored, notes = [], dict[str, str](), list(file.notes)
    questions, odd = list[Suspicion](), dict[str, list[str]]()
    if unlabelled := np.flatnonzero(mask_missing(labels)).tolist():
        notes.append(
            f"{file.where(unlabelled[0])}: no class in column {label!r}, nor in {len(unlabelled) - 1} other "
            "rows; a run needs one in every row: fill them in, or take these rows out"
        )
    for name in (name for name in file.columns if name not in (label, site, patient)):
        texts = file.columns[name]
        present = texts[~mask_missing(texts, missing)]
        distinct = np.unique(present).tolist()
        if _is_identifier(name, distinct, len(texts)):
            ignored[name] = "another value in each row, and the name of an identifier"
            continue
        if is_repeated_identifier(name, present):
            ignored[name] = "the name of an identifier, some of whose values repeat"
            questions.append(ask_whose(name, present, patient))
            continue
        if words := find_words(present, file):
            odd[name] = words
            present = present[~np.isin(present, np.array(words, dtype=present.dtype))]
            distinct = np.unique(present).tolist()
        try:
            kind = discover(file, [name], {}, [*missing, *odd.get(name, ())])[name]
        except DataError as error:
            ignored[name] = "not understood: see what init said of it"
            notes.append(f"column {name!r} is left out until you say what it is: {error}")
            continue
        if kind == "date":
            ignored[name] = "a date: it says when, and nothing of new patients"
        elif kind == "numeric" and _has_codes(distinct):
            codes.append(name)
            columns[name] = discover(file, [name], {name: "category"}, missing)[name]
        else:
            columns[name] = kind
            notes += [f"column {name!r} has {said}"] if (said := describe_groups(kind)) else []
    if odd:
        questions.insert(0, ask_about_cells(odd))
        missing = [*missing, *questions[0].value]
    options = {"label_column": label} | ({"site_column": site} if site else {})
    for name in follow_up(label, columns):
        questions.append(
            Suspicion(
                f"column {name!r} beside {label!r} looks like the time of a survival analysis, which is "
                "not done: as a feature it says how long somebody was followed, and nothing of a new patient",
                "column_kinds",
                {name: "ignore"},
            )
        )
    questions += inspect_table(file, label, columns, patient, missing, site=site)
    questions += inspect_names(samples)
    return Survey(
        "csv",
        file.path,
        dict(sorted(samples.items())),
        dict(sorted(Counter(file.columns[site].tolist()).items())) if site else {},
        columns=columns,
        codes=tuple(codes),
        ignored=ignored,
        options=options,
        patient=patient,
        notes=tuple(notes),
        questions=tuple(questions),
    )


def _is_identifier(name: str, distinct: Sequence[str], rows: int) -> bool:
    words = re.split(r"[_\W]+", name.lower())
    named = is_identifier(name) or bool({"id", "nr", "no", "number", "key", "name"} & set(words))
    return named and len(distinct) == rows > 1 and not has_decimals(distinct)


def _has_codes(distinct: Sequence[str]) -> bool:
    """Whether numbers are three to ten different small whole ones."""
    try:
        values = {float(text) for text in distinct}
    except ValueError:
        return False
    return 2 < len(values) <= 10 and all(value.is_integer() and 0 <= value <= 20 for value in values)


def _survey_npz(path: Path) -> Survey:
    try:
        with np.load(path, allow_pickle=False) as file:
            if not {"x", "y"} <= set(file.files):
                raise DataError(
                    f"{path}: no arrays x and y; found {', '.join(file.files)}. Name them in data.arrays"
                )
            x, y = file["x"], file["y"]
            names = [str(name) for name in file["classes"]] if "classes" in file.files else None
            sites = Counter(map(str, file["site"].tolist())) if "site" in file.files else Counter[str]()
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not an .npz file of plain arrays ({error})") from error
    texts = [names[int(label)] if names and y.dtype.kind in "iu" else str(label) for label in y.tolist()]
    height, width = (
        (x.shape[1:3] if x.ndim == 3 or x.shape[-1] in (1, 3) else x.shape[2:4]) if x.ndim > 2 else (0, 0)
    )
    colour = x.ndim == 4 and 3 in (x.shape[1], x.shape[-1])
    return Survey(
        "npz",
        path,
        dict(sorted(Counter(texts).items())),
        dict(sorted(sites.items())),
        sizes=((int(width), int(height)),) if x.ndim > 2 else (),
        modes=Counter({"colour" if colour else "gray": len(x)})
        if x.dtype == np.uint8
        else Counter({"deep": len(x)}),
    )
