"""The data of one site, as arrays, a table or a folder, and the copies of it that differ in one record."""

import csv
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from perennial.foundation.streams import stream

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Records:
    """x: (n, ...) images of 8 bits, or (n, D) numbers. y: (n,) names of classes. patient: (n,) or None.

    form: npz, csv or folder, which is how the site holds them. unreadable: records whose file is no image.
    """

    x: Array
    y: Array
    patient: Array | None = None
    form: str = "npz"
    unreadable: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.y)

    def write(self, folder: Path) -> dict[str, Any]:
        """Write them where they always lie in the site's folder; the `data` block of its site.yaml."""
        own: dict[str, Any] = {"source": self.form, "path": "data"}
        if self.form == "npz":
            arrays = {"x": self.x, "y": self.y}
            if self.patient is not None:
                arrays["patient"] = self.patient
                own["patient"] = "patient"
            np.savez(folder / "arrays.npz", **arrays)  # pyright: ignore[reportArgumentType]
            return own | {"path": "arrays.npz"}
        if self.form == "csv":
            names = columns_of(self.x.shape[1])
            with open(folder / "table.csv", "w", newline="") as file:
                lines = csv.writer(file)
                lines.writerow([*names, "label", *([] if self.patient is None else ["patient"])])
                for row in range(len(self)):
                    whose = [] if self.patient is None else [self.patient[row]]
                    lines.writerow([*(repr(float(value)) for value in self.x[row]), self.y[row], *whose])
            if self.patient is not None:
                own["patient"] = "patient"
            return own | {"path": "table.csv"}
        from PIL import Image

        root = folder / "data"
        shutil.rmtree(root, ignore_errors=True)
        for row in range(len(self)):
            place = root / str(self.y[row]) / f"{row:05d}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            if row in self.unreadable:
                place.write_bytes(b"no image")
            else:
                Image.fromarray(self.x[row]).save(place)
        return own

    def with_one(
        self, x: Array, y: str, patient: str | None = None, *, unreadable: bool = False
    ) -> "Records":
        """With one record more, which comes last."""
        owner = None if self.patient is None else np.append(self.patient, patient or "new")
        bad = (*self.unreadable, len(self)) if unreadable else self.unreadable
        return replace(
            self, x=np.concatenate([self.x, x[None]]), y=np.append(self.y, y), patient=owner, unreadable=bad
        )

    def with_other(self, row: int, x: Array, y: str | None = None) -> "Records":
        """With another record in the place of one."""
        xs, ys = self.x.copy(), self.y.copy()
        xs[row], ys[row] = x, self.y[row] if y is None else y
        return replace(self, x=xs, y=ys)

    def without_class(self, name: str) -> "Records":
        """Without the records of one class."""
        kept = self.y != name
        return replace(
            self, x=self.x[kept], y=self.y[kept], patient=None if self.patient is None else self.patient[kept]
        )


def columns_of(width: int) -> list[str]:
    """Names of a table's columns."""
    return [f"f{index}" for index in range(width)]


def drawn(
    seed: int,
    site: str,
    shape: Sequence[int],
    classes: Sequence[str],
    of_each: int,
    *,
    patients: bool = False,
    form: str = "npz",
) -> Records:
    """Random records that a class has something in common of. shape: (H, W), (H, W, 3) or (D,)."""
    draw = stream(seed, "twins", site)
    y = np.array([name for name in classes for _ in range(of_each)])
    x = np.stack([record(seed, f"{site} {row}", shape, classes.index(name)) for row, name in enumerate(y)])
    order = draw.permutation(len(y))
    owner = np.array([f"p{row // 3}" for row in range(len(y))]) if patients else None
    return Records(x[order], y[order], owner, form)


def record(seed: int, name: str, shape: Sequence[int], label: int) -> Array:
    """One record of a class. name: decides which."""
    draw = stream(seed, "twins-record", name)
    centre = stream(seed, "twins-class", label).normal(0, 1, tuple(shape))
    values = centre + 0.5 * draw.normal(0, 1, tuple(shape))
    if len(shape) == 1:
        return values.astype(np.float64)
    return np.clip(128 + 40 * values, 0, 255).astype(np.uint8)
