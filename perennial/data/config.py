"""The `data` block of an experiment, checked before anything is read, and every kind of source."""

import operator
import re
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, Self, get_args

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, model_validator

from perennial.data.tasks_config import Name, Names, PartitionConfig
from perennial.foundation.errors import suggest_nearest
from perennial.foundation.plain import FiniteBlock, Plain
from perennial.foundation.plugins import is_target, list_known

IMAGES = ("image_size", "color", "resize")
FILES = ("window", "unreadable")
"""Of sources that read image files one by one."""
TABLE = (
    *("columns", "column_kinds", "label_column", "site_column"),
    *("missing", "imputation", "decimal", "units", "limits", "unreadable"),
)
COLLECTED = ("path", "labels", "patient")
APART = ("subgroup",)
"""Of sources that are tables or manifests."""


@dataclass(frozen=True)
class SourceKind:
    """How one kind of data source is read.

    reader: `module:function`, called with the data block, and with `takes` by name.
    options: keys that other kinds would ignore.
    needs: keys without which nothing can be read.
    collected: somebody's own data, which every site can bring for itself, and in which a class outside the
    registry is a mistake; other kinds are benchmarks whose classes are known.
    own_sites: whether the data says who holds each sample: it can, never, always, or
    where site_column says so.
    """

    reader: str
    options: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    takes: tuple[Literal["seed", "cache"], ...] = ()
    collected: bool = False
    own_sites: Literal["can", "never", "always", "by_column"] = "can"


SOURCES: dict[str, SourceKind] = {
    "digits": SourceKind("perennial.data.public_sets:load_digits", IMAGES, own_sites="never"),
    "folder": SourceKind(
        "perennial.data.folder:load_folder",
        (*COLLECTED, *IMAGES, *FILES, *APART),
        takes=("cache",),
        collected=True,
    ),
    "csv": SourceKind(
        "perennial.data.table:load_table",
        (*COLLECTED, *TABLE, *APART),
        collected=True,
        own_sites="by_column",
    ),
    "npz": SourceKind(
        "perennial.data.npz:load_npz", (*COLLECTED, "arrays", *IMAGES, "window"), collected=True
    ),
    "pack": SourceKind("perennial.data.pack:load_pack", ("path", "patient", *IMAGES), needs=("path",)),
    "torchvision": SourceKind(
        "perennial.data.public_sets:load_torchvision",
        ("path", "dataset", "download", *IMAGES),
        needs=("path",),
        own_sites="never",
    ),
    "synth_groups": SourceKind(
        "perennial.data.public_sets:load_synth_groups", takes=("seed",), own_sites="always"
    ),
}
PLUGIN_OPTIONS = (
    "path",
    "labels",
    "options",
    "patient",
    *IMAGES,
    *FILES,
    *TABLE,
    "arrays",
    "dataset",
)
"""Keys that a plug-in may read from the data block."""


def find_kind(source: str) -> SourceKind:
    """The SourceKind of a source's name; for a plug-in, one that reads by its `module:function`."""
    return SOURCES.get(source) or SourceKind(source, PLUGIN_OPTIONS)


DatasetName = Literal["cifar10", "cifar100", "mnist", "fashion_mnist", "emnist"]
ArrayRole = Literal[
    "x", "y", "site", "patient", "x_test", "y_test", "site_test", "patient_test", "classes", "site_names"
]

# Options that mean something to some sources or partitions only: elsewhere they would be ignored in silence.
_OPTIONS = (
    *("path", "dataset", "download", "labels", "image_size", "color", "resize", "window"),
    *("columns", "column_kinds", "label_column", "site_column", "missing", "imputation"),
    *(
        "decimal",
        "units",
        "limits",
        "unreadable",
        "arrays",
        "options",
        "patient",
        "subgroup",
    ),
)


DICOM_PATIENT = "PatientID"
"""data.patient of DICOM files in class folders: the element that says whose each is."""


def compile_patient_pattern(text: str) -> re.Pattern[str]:
    """The regular expression that finds a patient in a file's name. Raises ValueError on a faulty one."""
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise ValueError(f"patient: {text!r} is no regular expression ({error})") from None
    if pattern.groups != 1:
        raise ValueError(f"patient: {text!r} has {pattern.groups} groups; allowed: one, which is the patient")
    return pattern


Cap = PositiveInt | Annotated[float, Field(gt=0, lt=1)]
Pixels = Annotated[int, Field(gt=0, le=4_096)]
MOST_SITES = 10_000


def _check_source(name: str) -> str:
    if name not in SOURCES and not is_target(name):
        allowed = list_known("source", SOURCES)
        if name.lower() in get_args(DatasetName):
            raise ValueError(
                f"allowed: {', '.join(allowed)}; for this one, torchvision with dataset: {name.lower()}"
            )
        raise ValueError(f"allowed: {', '.join(allowed)}{suggest_nearest(name, allowed)}")
    return name


def _is_none(value: object) -> bool:
    return value is None


class SubgroupConfig(FiniteBlock):
    """A column of a table or manifest by which measures are shown apart, for instance sex.

    values: its values that are shown, in this order at every site; samples with another one are in none.
    """

    column: str
    values: Names


Constants = float | tuple[float, ...] | dict[str, float]


class NormaliseConfig(FiniteBlock):
    """Public constants of (x - mean) / std; 8-bit images are scaled to 0..1 before.

    Each is one number, one for each channel or feature, or (csv) one for each numeric column by name.
    """

    mean: Constants
    std: Constants

    @model_validator(mode="after")
    def _check_constants(self) -> Self:
        spread = list(self.std.values()) if isinstance(self.std, dict) else np.atleast_1d(self.std).tolist()
        if min(spread, default=0) <= 0:
            raise ValueError(f"std must be positive; found {self.std}")
        names = [set(value) if isinstance(value, dict) else None for value in (self.mean, self.std)]
        if names[0] != names[1]:
            raise ValueError("mean and std must name the same columns, or both none")
        return self


class AugmentationConfig(FiniteBlock):
    """Changes of training images: random crop after zero padding of crop_padding pixels a side; flip."""

    crop_padding: int = Field(default=0, ge=0)
    flip: bool = False

    @property
    def active(self) -> bool:
        return self.crop_padding > 0 or self.flip


def _extract_action(found: object) -> object:
    """The action alone of {action, at_most}, as earlier releases wrote it, where at_most has its default."""
    if isinstance(found, dict) and found.keys() <= {"action", "at_most"}:
        if found.get("at_most", MOST_UNREADABLE) != MOST_UNREADABLE:
            raise ValueError("at_most is gone: up to 5 % are skipped; allowed refuse or skip")
        return found.get("action", "refuse")
    return found


Unreadable = Annotated[Literal["refuse", "skip"], BeforeValidator(_extract_action)]
MOST_UNREADABLE = 0.05


def describe_skipped(rule: Literal["refuse", "skip"], unreadable: int, of: int, what: str) -> str | None:
    """A note that says how many of `of` files or rows were skipped; None if they must be refused.

    One may always be skipped, and of many MOST_UNREADABLE. what: they are, for the note.
    """
    if rule == "refuse" or unreadable > max(1, MOST_UNREADABLE * of):
        return None
    return f"{what} cannot be read: {unreadable} of {of}"


def _check_window(window: tuple[float, float]) -> tuple[float, float]:
    if window[0] >= window[1]:
        raise ValueError(f"the value that becomes black must be below that of white; found {list(window)}")
    return window


Window = Literal["file", "full"] | Annotated[tuple[float, float], AfterValidator(_check_window)]
ColumnKind = Literal["numeric", "category", "date", "ignore"]


class DataConfig(FiniteBlock):
    """The `data` block of an experiment, or of a site's own file with what the experiment fixes filled in.

    source: the kind of data. path: the folder, the CSV or .npz file, or the pack; from the file's own folder.
    dataset, download: of torchvision; nothing is downloaded without being asked for.
    sites: how many simulated sites; none for a natural partition. partition: how they share the samples.
    label_column, site_column (csv): the columns that hold the class, and who holds the row.
    normalise: constants of (x - mean) / std. augmentation: of training images.
    classes: the registry. A fixed benchmark source takes these classes out of its own; a folder or table
        that holds any other class is refused. Without it the classes found are the registry, and a label
        such as NA in a table or manifest is a missing one.
    labels: a site's own label -> class of the registry.
    image_size, color: what images become; in arrays (npz) of more than 8 bits they need window as well.
        Without image_size files become what the model's fixed maps ask for.
    resize: to image_size: stretch; pad, black beside the whole image; or crop, the middle of it.
    window: the values that become black and white, for images of more than 8 bits; full: the least and the
        greatest that the file's kind of number has; file: as a DICOM file says, which is the rule for those.
    columns (csv): feature -> "numeric", "date" or its categories; without it they are discovered, in
    simulation only. column_kinds: what columns are, where discovery would be wrong; ignore leaves one out.
    missing (csv): texts that mean a missing value, beside the usual ones such as NA.
    imputation (csv): what stands for a missing number: mean or median of the training rows, a number, or one
        for each column. An indicator of missing values stands beside each number whatever is chosen.
    decimal (csv): the sign in the file's numbers, where what is found by itself is wrong.
    units (csv): column -> the unit that stands behind its numbers, which is taken away; one that no cell has
    says which unit the numbers are in. limits (csv): columns in which a text such as <0.5 counts as 0.5.
    unreadable: refuse (the default) files and cells that cannot be read, or skip up to 5 % of them.
    arrays (npz): role -> name of the array in the file, where it is not the role's own.
    patient: where the data names each sample's patient: a column of a table or manifest, the array of a pack
        or npz file (the one that goes with x), or for images in class folders a regular expression with one
        group, searched in the file's name, or PatientID, the element of DICOM files, of which no more than a
        keyed hash is kept. All samples of a patient are in one part and at one site.
    subgroup (csv, manifest): a column by whose values the measures are shown, too; it decides nothing else.
    test_fraction, validation_fraction: of all records, and of those that are left: on average, since a keyed
        hash of each record decides (data/splits.py).
    calibration_fraction: of the records that are left then; they serve the thresholds of prediction sets
        (evaluation.coverage) and nothing else.
    samples_limit, test_limit: caps of the whole training and test part, for simulation on a CPU: a number of
        samples (on average), or a share between 0 and 1.
    """

    source: Annotated[str, AfterValidator(_check_source)]
    path: str | None = None
    dataset: DatasetName | None = None
    download: bool = False
    classes: Names | None = None
    labels: dict[Name, Name] | None = None
    image_size: Pixels | tuple[Pixels, Pixels] | None = None
    color: Literal["rgb", "gray"] | None = None
    resize: Literal["stretch", "pad", "crop"] = Field(
        default="stretch", exclude_if=partial(operator.eq, "stretch")
    )
    window: Window | None = Field(default=None, exclude_if=_is_none)
    columns: dict[str, Literal["numeric", "date"] | Names] | None = None
    column_kinds: dict[str, ColumnKind] = Field(default_factory=dict, exclude_if=operator.not_)
    label_column: str = "label"
    site_column: str | None = None
    missing: tuple[str, ...] = Field(default=(), exclude_if=operator.not_)
    imputation: Literal["mean", "median"] | float | dict[str, float] = Field(
        default="mean", exclude_if=partial(operator.eq, "mean")
    )
    decimal: Literal[".", ","] | None = Field(default=None, exclude_if=_is_none)
    units: dict[str, str] = Field(default_factory=dict, exclude_if=operator.not_)
    limits: tuple[str, ...] = Field(default=(), exclude_if=operator.not_)
    unreadable: Unreadable = Field(default="refuse", exclude_if=partial(operator.eq, "refuse"))
    arrays: dict[ArrayRole, str] = Field(default_factory=dict)
    patient: str | None = None
    subgroup: SubgroupConfig | None = Field(default=None, exclude_if=operator.not_)
    sites: int | None = Field(default=None, gt=0, le=MOST_SITES)
    partition: PartitionConfig = PartitionConfig()
    test_fraction: float = Field(default=0.2, ge=0, lt=1)
    validation_fraction: float = Field(default=0.1, ge=0, lt=1)
    calibration_fraction: float = Field(default=0.0, ge=0, lt=1, exclude_if=operator.not_)
    normalise: NormaliseConfig | None = None
    samples_limit: Cap | None = None
    test_limit: Cap | None = None
    augmentation: AugmentationConfig = AugmentationConfig()
    options: dict[str, Plain] = Field(default_factory=dict, exclude_if=operator.not_)
    """Keys of a source that is a plug-in: the keywords of its function after the first two."""

    @property
    def kind(self) -> SourceKind:
        """How this kind of source is read, and which keys it takes."""
        return find_kind(self.source)

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) that images are resized to; None keeps them."""
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        for key in _OPTIONS:
            if self.is_set(key) and key not in self.kind.options:
                sources = [name for name, kind in SOURCES.items() if key in kind.options]
                allowed = " or ".join(sources) or "of a plug-in"
                raise ValueError(f"{key} belongs to source {allowed}; found source {self.source!r}")
        if self.source == "torchvision" and self.dataset is None:
            raise ValueError(f"source 'torchvision' needs dataset: {', '.join(get_args(DatasetName))}")
        for key in self.kind.needs:
            if not self.is_set(key):
                raise ValueError(f"source {self.source!r} needs {key}")
        if self.only_at_sites and self.classes is None:
            raise ValueError(
                f"source {self.source!r} needs path; an experiment without data of its own must list classes"
            )
        if self.source == "csv" and self.augmentation.active:
            raise ValueError("augmentation is for images; found source 'csv'")
        by_name = self.normalise is not None and isinstance(self.normalise.mean, dict)
        if by_name != (self.normalise is not None and self.source == "csv"):
            raise ValueError("normalise names columns for source 'csv', and only there")
        return self

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        if self.columns is not None and self.column_kinds:
            raise ValueError(
                "columns lists every feature and what it is; column_kinds is for data without it"
            )
        for key in ("label_column", "site_column", "patient"):
            for listed in ("columns", "column_kinds"):
                if getattr(self, key) in (getattr(self, listed) or {}):
                    raise ValueError(f"{listed} lists {getattr(self, key)!r}, which is the {key}")
        return self

    @model_validator(mode="after")
    def _check_patient(self) -> Self:
        in_names = self.source == "folder" and self.patient is not None and self.path is not None
        if in_names and self.patient != DICOM_PATIENT and not str(self.path).lower().endswith(".csv"):
            compile_patient_pattern(str(self.patient))
        if self.patient is not None and {"patient"} & self.arrays.keys():
            raise ValueError("patient and arrays.patient both name the array; give one")
        return self

    @property
    def only_at_sites(self) -> bool:
        """Whether the experiment has no data of its own, so that every site brings its own."""
        return self.path is None and self.kind.collected

    @property
    def shares(self) -> tuple[str, ...] | None:
        """Names of the simulated sites that share the data; None if the data name the sites or are theirs."""
        if self.partition.kind == "natural" or self.sites is None or self.only_at_sites:
            return None
        return tuple(f"site-{index}" for index in range(self.sites))

    @model_validator(mode="after")
    def _check_partition(self) -> Self:
        kind = self.partition.kind
        if kind == "natural" and self.kind.own_sites == "never":
            raise ValueError(f"partition.kind 'natural': source {self.source!r} has no sites of its own")
        if kind == "natural" and self.kind.own_sites == "by_column" and self.site_column is None:
            raise ValueError(f"partition.kind 'natural' of source {self.source!r} needs site_column")
        if kind != "natural" and self.kind.own_sites == "always":
            raise ValueError(
                f"source {self.source!r} makes its own sites: set partition.kind 'natural', not {kind!r}"
            )
        return self
