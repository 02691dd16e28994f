"""What Perennial does not do, by name: files that it cannot read, and tasks that are no classification."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from perennial.data.table_columns import is_number
from perennial.foundation.errors import DataError

FORMATS = {
    "SPSS": (".sav", ".zsav", ".por"),
    "Stata": (".dta",),
    "SAS": (".sas7bdat", ".xpt"),
    "R": (".rds", ".rdata", ".rda"),
    "JSON": (".json", ".jsonl", ".ndjson"),
    "Feather": (".feather",),
    "Excel": (".xls", ".xlsb", ".ods"),
    "NIfTI": (".nii", ".nii.gz"),
    "NRRD": (".nrrd", ".nhdr"),
    "MetaImage": (".mha", ".mhd"),
}
VOLUMES = ("NIfTI", "NRRD", "MetaImage")
_MASK = re.compile(
    r"(^|[_\-. ])(mask|masks|segmentation|seg|groundtruth|gt|maske)([_\-. ]?\d*)?(\.\w+)?$", re.I
)
_TIME = re.compile(
    r"(os|pfs|rfs|dfs|efs|survival|surv|follow_?up|fu|event|death)?_?(time|days|months|years|tage|monate)"
    r"(_to_(event|death|last_follow_?up))?|futime|time_?to_?\w+|days_to_\w+|survival_?\w*",
    re.I,
)
_EVENT = re.compile(
    r"event|status|censored|censor|vital_?status|dead|death|deceased|os|pfs|verstorben|zensiert", re.I
)


def format_of(name: str) -> str:
    """The program or standard that a file's name stands for; '' for one that is read, or is unknown."""
    return next((kind for kind, ends in FORMATS.items() if name.lower().endswith(ends)), "")


def refuse_foreign_format(path: Path) -> None:
    """Raise DataError naming the format of a file that Perennial does not read, and the way out."""
    if not (kind := format_of(path.name)):
        return
    if kind in VOLUMES:
        raise DataError(
            f"{path}: a volume in {kind}, which is not read; Perennial classifies images: write the slices "
            "that matter as PNG or DICOM into class folders"
        )
    raise DataError(f"{path}: a file of {kind}, which is not read; save it as CSV (in UTF-8) first")


def require_classes(where: str, label: str, values: Sequence[str], most: int) -> None:
    """Raise DataError where a column of labels has more than `most` values, naming regression where it is."""
    if len(values) <= most:
        return
    numbers = [float(value) for value in values if is_number(value)]
    if len(numbers) >= 0.9 * len(values):
        raise DataError(
            f"{where}: column {label!r} has {len(values)} different numbers, {min(numbers):g} to "
            f"{max(numbers):g}: to predict a quantity is regression, which Perennial does not do; cut it "
            "into classes in the file (such as low, normal, high), or name another column with --label"
        )
    raise DataError(f"{where}: column {label!r} has {len(values)} values, too many for classes")


def describe_joined_classes(samples: Mapping[str, int]) -> str:
    """A question where class names join several, as of findings of one image; '' where none does.

    samples: by class.
    """
    for sign in ("|", ";", "+", "&", ","):
        joined = [name for name in samples if sign in name]
        parts = Counter(part.strip() for name in joined for part in name.split(sign))
        again = [part for part, count in parts.items() if part and (part in samples or count > 1)]
        if joined and len(again) >= 2:
            return (
                f"{len(joined)} classes join several, such as {joined[0]!r}: one record with several classes "
                "(multi-label) is not done, and each combination would be a class of its own; make one table "
                "for each finding, with two classes"
            )
    return ""


def follow_up(label: str, columns: Iterable[str]) -> list[str]:
    """Columns that say how long a patient was followed, where the label is an event: survival analysis."""
    if not _EVENT.fullmatch(label):
        return []
    return [name for name in columns if _TIME.fullmatch(name)]


def find_masks(files: Sequence[Path], root: Path) -> list[Path]:
    """Images that are named as masks of others, as for segmentation."""
    named = [path for path in files if _MASK.search(path.stem)]
    kept = {path.stem for path in files}
    beside = [path for path in named if _MASK.sub("", path.stem) in kept]
    inside = [
        path for path in files if any(_MASK.fullmatch(part) for part in path.relative_to(root).parts[:-1])
    ]
    return sorted({*beside, *inside})


def find_volume_format(root: Path) -> str:
    """The format of volumes that lie in a folder; '' where there are none."""
    found = (format_of(path.name) for path in root.rglob("*") if path.is_file())
    return next((kind for kind in found if kind in VOLUMES), "")
