"""What was seen in data that nobody has described yet, and a first look at image files."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from perennial.data.images import is_dicom
from perennial.data.refused import find_masks
from perennial.data.suspicion import Suspicion, inspect_names
from perennial.foundation.errors import ConfigError, DataError


@dataclass(frozen=True)
class Survey:
    """source: folder, csv or npz. samples: by class. sites: samples by site, {} where the data name none.

    sizes, modes: of the images looked at: (width, height), and gray, colour, dicom or the greatest value of
    deeper ones. columns: of a table, with kinds; ignored: others, and why. options: keys of the data block
    that the data need. questions: that nobody has answered.
    """

    source: Literal["folder", "csv", "npz"]
    path: Path
    samples: dict[str, int]
    sites: dict[str, int] = field(default_factory=dict)
    sizes: tuple[tuple[int, int], ...] = ()
    modes: Counter[str] = field(default_factory=Counter)
    deepest: int = 0
    columns: dict[str, Any] = field(default_factory=dict)
    codes: tuple[str, ...] = ()
    ignored: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    patient: str | None = None
    patient_guess: str | None = None
    notes: tuple[str, ...] = ()
    questions: tuple[Suspicion, ...] = ()

    @property
    def images(self) -> bool:
        """Whether the samples are images."""
        return bool(self.sizes)

    @property
    def total(self) -> int:
        """Number of samples."""
        return sum(self.samples.values())

    @property
    def sizes_in_words(self) -> str:
        """The least and the largest size of the images."""
        widths, heights = zip(*self.sizes, strict=True)
        if len(set(self.sizes)) == 1:
            return f"all {widths[0]} x {heights[0]} pixels"
        return f"{min(widths)} x {min(heights)} to {max(widths)} x {max(heights)} pixels"

    def apply_answer(self, question: Suspicion) -> "Survey":
        """This survey after a person answered yes to `question`: the key that it proposes is set."""
        key, value, options = question.key, question.value, dict(self.options)
        if key == "patient":
            ignored = {name: why for name, why in self.ignored.items() if name != value}
            return replace(self, patient=str(value), ignored=ignored)
        if key == "column_kinds":
            kept = {name: kind for name, kind in self.columns.items() if name not in value}
            codes = tuple(name for name in self.codes if name not in value)
            return replace(
                self, columns=kept, codes=codes, ignored=self.ignored | dict.fromkeys(value, question.text)
            )
        if key == "units":
            return replace(self, options=options | {key: {**options.get(key, {}), **dict[str, str](value)}})  # pyright: ignore
        if isinstance(value, Mapping):
            samples = Counter[str]()
            for name, count in self.samples.items():
                samples[value.get(name, name)] += count
            renamed = options.get("labels", {}) | dict(value)
            return replace(self, samples=dict(samples), options=options | {"labels": renamed})
        if isinstance(value, str):
            return replace(self, options=options | {key: value})
        # what is left is a list of texts
        return replace(self, options=options | {key: [*options.get(key, []), *map(str, value)]})


MOST_LOOKED_AT = 200
"""Image files of which size and kind are read."""


def have_patients(files: Sequence[Path]) -> bool:
    """Whether all are DICOM files, and those looked at say whose they are and are not all of one patient."""
    if not all(map(is_dicom, files)):
        return False
    from perennial.data.dicom import read_patient

    try:
        return len({read_patient(path) for path in _sample_files(files)}) > 1
    except DataError:
        return False


def _sample_files(files: Sequence[Path]) -> Sequence[Path]:
    """Files from all over, at most MOST_LOOKED_AT."""
    return files[:: max(1, len(files) // MOST_LOOKED_AT)][:MOST_LOOKED_AT]


def _read_dicom_shape(path: Path) -> tuple[tuple[int, int], bool]:
    from perennial.data.dicom import read_shape

    return read_shape(path)


def survey_images(files: Sequence[Path], found: Survey) -> Survey:
    """The survey with what some of the images are."""
    from PIL import Image

    sizes, modes, deepest, plain = list[tuple[int, int]](), Counter[str](), 0, list[Path]()
    unseen, looked_at = list[Path](), _sample_files(files)
    for path in looked_at:
        try:
            if is_dicom(path):
                size, seen = _read_dicom_shape(path)
                modes["dicom"] += 1
                sizes.append(size)
                unseen += [] if seen else [path]
                continue
            with Image.open(path) as image:
                ends = np.array(image.getextrema()).reshape(-1, 2)
                if (ends[:, 0] == ends[:, 1]).all():
                    plain.append(path)
                sizes.append(image.size)
                deep = image.mode in ("I", "F") or image.mode.startswith("I;16")
                modes["deep" if deep else "gray" if image.mode in ("1", "L", "LA") else "colour"] += 1
                if deep:
                    deepest = max(deepest, int(np.asarray(image).max()))
        except ConfigError:
            # the library that reads DICOM files is not installed
            raise
        except Exception:
            modes["unreadable"] += 1
    questions = [*inspect_names(found.samples)]
    if unseen and not modes["deep"]:
        questions.append(
            Suspicion(
                f"{len(unseen)} of {len(looked_at)} DICOM files that were looked at have no window of their "
                f"own, the first {unseen[0]}: they cannot be read until data.window names the values that "
                "become black and white; full takes all that their bits can hold",
                "window",
                "full",
            )
        )
    if masks := find_masks(files, found.path if found.path.is_dir() else found.path.parent):
        questions.append(
            Suspicion(
                f"{len(masks)} images look like masks of others, the first {masks[0]}: to find where "
                "something lies (segmentation) is not done, and they would be images of their class; take "
                "them out"
            )
        )
    if plain:
        questions.append(
            Suspicion(
                f"{len(plain)} images have one colour in all pixels, the first {plain[0]}; take them out"
            )
        )
    return replace(found, sizes=tuple(sizes), modes=modes, deepest=deepest, questions=tuple(questions))
