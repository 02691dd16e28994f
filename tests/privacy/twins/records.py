"""The data of one site, as arrays, and the copies of it that differ in one record."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from perennial.foundation.streams import stream

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Records:
    """x: (n, H, W) images of 8 bits. y: (n,) names of classes. patient: (n,) or None."""

    x: Array
    y: Array
    patient: Array | None = None

    def __len__(self) -> int:
        return len(self.y)

    def write(self, folder: Path) -> dict[str, Any]:
        """Write them where they always lie in the site's folder; the `data` block of its site.yaml."""
        arrays = {"x": self.x, "y": self.y}
        if self.patient is not None:
            arrays["patient"] = self.patient
        np.savez(folder / "arrays.npz", **arrays)  # pyright: ignore[reportArgumentType]
        own: dict[str, Any] = {"source": "npz", "path": "arrays.npz"}
        return own if self.patient is None else own | {"patient": "patient"}

    def with_one(self, x: Array, y: str, patient: str | None = None) -> "Records":
        """With one record more, which comes last."""
        owner = None if self.patient is None else np.append(self.patient, patient or "new")
        return replace(self, x=np.concatenate([self.x, x[None]]), y=np.append(self.y, y), patient=owner)

    def with_other(self, row: int, x: Array, y: str | None = None) -> "Records":
        """With another record in the place of one."""
        xs, ys = self.x.copy(), self.y.copy()
        xs[row], ys[row] = x, self.y[row] if y is None else y
        return replace(self, x=xs, y=ys)


def drawn(
    seed: int,
    site: str,
    shape: Sequence[int],
    classes: Sequence[str],
    of_each: int,
    *,
    patients: bool = False,
) -> Records:
    """Random images that a class has something in common of. shape: (H, W)."""
    draw = stream(seed, "twins", site)
    y = np.array([name for name in classes for _ in range(of_each)])
    x = np.stack([record(seed, f"{site} {row}", shape, classes.index(name)) for row, name in enumerate(y)])
    order = draw.permutation(len(y))
    owner = np.array([f"p{row // 3}" for row in range(len(y))]) if patients else None
    return Records(x[order], y[order], owner)


def record(seed: int, name: str, shape: Sequence[int], label: int) -> Array:
    """One record of a class. name: decides which."""
    draw = stream(seed, "twins-record", name)
    centre = stream(seed, "twins-class", label).normal(0, 1, tuple(shape))
    values = centre + 0.5 * draw.normal(0, 1, tuple(shape))
    return np.clip(128 + 40 * values, 0, 255).astype(np.uint8)
