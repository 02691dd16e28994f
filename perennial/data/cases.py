"""Several images of one case as one record: they lie side by side, as tiles of one image.

A map with as many `tiles` averages its features over them, and does not count places that are black. So what
is split, counted, summed, judged and protected is the case.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from perennial.data.samples import Samples, Source
from perennial.foundation.errors import DataError
from perennial.foundation.tiling import grid_of


def sheet_shape(shape: tuple[int, int, int], images: int) -> tuple[int, int, int]:
    """(C, H, W) of a record that holds `images` tiles of this (C, H, W)."""
    rows, columns = grid_of(images)
    return shape[0], rows * shape[1], columns * shape[2]


def image_shape(shape: tuple[int, ...], images: int) -> tuple[int, int, int]:
    """(C, H, W) of one tile in a record of this shape with `images` tiles."""
    rows, columns = grid_of(images)
    return shape[0], shape[1] // rows, shape[2] // columns


def sheet(x: Tensor, images: int) -> Tensor:
    """(C, H, W) record of a case's images (n, C, h, w): tiles in row order, black where there is no image.

    images: number of tiles. Of more images than that, evenly spaced ones are taken.
    """
    _, columns = grid_of(images)
    if len(x) > images:
        x = x[torch.arange(images) * len(x) // images]
    record = torch.zeros(sheet_shape((x.shape[1], x.shape[2], x.shape[3]), images), dtype=x.dtype)
    for place, image in enumerate(x):
        top, left = place // columns * x.shape[2], place % columns * x.shape[3]
        record[:, top : top + x.shape[2], left : left + x.shape[3]] = image
    return record


def pooled(source: Source, images: int) -> Source:
    """The source with all images of a case as the tiles of one record. images: number of tiles.

    Raises DataError if the data name no patients, are no 8-bit images, or give one case two classes.
    """
    notes: list[str] = []
    train = _cases(source.train, images, source.classes, notes.append)
    test = None if source.test is None else _cases(source.test, images, source.classes, notes.append)
    return replace(source, train=train, test=test, notes=(*source.notes, *notes))


def _cases(samples: Samples, images: int, classes: tuple[str, ...], note: Callable[[str], None]) -> Samples:
    if not samples.patients or samples.groups is None:
        raise DataError("data.pool: case: the data say of no image whose it is; give data.patient")
    if samples.x.ndim != 4 or samples.x.dtype != torch.uint8:
        raise DataError("data.pool: case: found records that are no 8-bit images; allowed: such images")
    sites = np.zeros(len(samples), dtype=np.int64) if samples.site is None else samples.site.numpy()
    # the same patient at two sites is a case at each
    whose = np.concatenate([samples.groups, sites[:, None].view(np.uint8)], axis=1)
    _, first, index = np.unique(whose, axis=0, return_index=True, return_inverse=True)
    index = index.reshape(-1)
    order = np.argsort(first, kind="stable")
    rows = [np.flatnonzero(index == case) for case in order]
    labels = samples.y.numpy()
    for case in rows:
        if len(found := np.unique(labels[case])) > 1:
            place = "" if samples.keys is None else f" ({samples.keys[case[0]]})"
            raise DataError(
                f"data.pool: case: found images of one case{place} with the classes "
                f"{', '.join(repr(classes[label]) for label in found)}; a case has one class: let "
                "data.patient name what a class belongs to, for instance a lesion"
            )
    if many := sum(len(case) > images for case in rows):
        note(f"{many} cases have more than {images} images; {images} of each count, evenly from its first on")
    firsts = torch.from_numpy(first[order])
    x = torch.stack([sheet(samples.x[torch.from_numpy(case)], images) for case in rows])
    subgroup = samples.subgroup
    if subgroup is not None:
        alike = [subgroup[case[0]] if len(np.unique(subgroup[case])) == 1 else -1 for case in rows]
        subgroup = np.array(alike, dtype=np.int64)
    kept = replace(samples, x=samples.x[:, :, :0, :0]).pick(firsts)
    return replace(kept, x=x, subgroup=subgroup)
