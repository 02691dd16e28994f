"""What was seen in data that nobody has described yet, and which of it a person has to decide."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from perennial.data.suspicion import Suspicion


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

    def answered(self, question: Suspicion) -> "Survey":
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
            return replace(self, options=options | {key: options.get(key, {}) | dict(value)})
        if isinstance(value, Mapping):
            samples = Counter[str]()
            for name, count in self.samples.items():
                samples[value.get(name, name)] += count
            renamed = options.get("labels", {}) | dict(value)
            return replace(self, samples=dict(samples), options=options | {"labels": renamed})
        if isinstance(value, str):
            return replace(self, options=options | {key: value})
        return replace(self, options=options | {key: [*options.get(key, []), *value]})
