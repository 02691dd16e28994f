"""Every kind of data source: the function that reads it, and the keys of a `data` block that it takes."""

from dataclasses import dataclass
from typing import Literal

IMAGES = ("image_size", "color", "resize")
FILES = ("window", "frame", "unreadable")
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


def kind_of(source: str) -> SourceKind:
    """The SourceKind of a source's name; for a plug-in, one that reads by its `module:function`."""
    return SOURCES.get(source) or SourceKind(source, PLUGIN_OPTIONS)
