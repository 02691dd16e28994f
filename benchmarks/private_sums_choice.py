"""Which blocks and how many components noised sums take: digits, and 4,000 images of CIFAR-100 say.

Noise shrinks beside sums as records grow, so k times the records are what noise divided by k is: one data
set stands for many sizes. The measure of a setting is `strength`: records over the noise multiplier times the
root of the releases that are added up. Each cell is the mean over draws; the records that judge are in no
sum.

    python -m benchmarks.private_sums_choice --pack ../shared/data/cifar100.webp.zip
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.environment import machine, versions
from perennial.data.pack import pack_arrays
from perennial.foundation.errors import DataError
from perennial.foundation.files import replace_file
from perennial.learning.analytic.noised import NoisedSums, noised_gaussian
from perennial.models.feature_maps.ball import unit_rows
from perennial.models.feature_maps.patches import Patches, drawn_filters
from perennial.models.feature_maps.projection import public_crops, whitened_components
from perennial.privacy.noised_sums import BLOCKS, Blocks, SumsNoise

STRENGTHS = (30, 100, 300, 1000, 3000, 10_000, 30_000)
MEANS: Blocks = (0.0, 1.0, 0.2)
DRAWS = 6
IMAGES, CROPS = 4000, 1000


def digits() -> tuple[Tensor, Tensor]:
    """Pixels around a constant centre, of length 1."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return unit_rows(torch.from_numpy(x / 16 - 0.5)), torch.from_numpy(y).long()


def cifar(pack: Path, widths: tuple[int, ...]) -> tuple[dict[int, Tensor], Tensor]:
    """Components of 100 patches of 6 x 6 pixels by number, and coarse labels, 20 classes."""
    arrays = pack_arrays(pack, ("x_train", "y_train", "fine_to_coarse"))
    rows = np.random.default_rng(0).permutation(len(arrays["y_train"]))[:IMAGES]
    images = torch.from_numpy(arrays["x_train"][rows]).permute(0, 3, 1, 2).float()
    network = Patches(drawn_filters(100, 6, 3, 0), 3, 0.5, None, 0.5)

    def mapped(pixels: Tensor) -> Tensor:
        with torch.inference_mode():
            return unit_rows(torch.cat([network(part) for part in pixels.split(64)])).double()

    crops, seen = mapped(public_crops(CROPS, (3, 32, 32), 0).float()), mapped(images)
    found = {}
    for width in widths:
        mean, components = whitened_components(crops, width)
        found[width] = unit_rows((seen - mean.double()) @ components.double())
    return found, torch.from_numpy(arrays["fine_to_coarse"][arrays["y_train"][rows]].astype(np.int64))


def accuracy(phi: Tensor, y: Tensor, strength: float, blocks: Blocks, draw: int) -> float:
    """Of the head from sums over four fifths of the records under noise of this strength, on the others."""
    generator = torch.Generator().manual_seed(draw)
    order = torch.randperm(len(y), generator=generator)
    fit, asked = order[: len(y) * 4 // 5], order[len(y) * 4 // 5 :]
    classes, width = int(y.max()) + 1, phi.shape[1]
    std = SumsNoise.of(len(fit) / strength, width, blocks)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    members = torch.nn.functional.one_hot(y[fit], classes).double()
    gram = None
    if blocks[0]:
        beside = torch.triu(noise(width, width), 1) * std.gram / 2**0.5
        gram = phi[fit].T @ phi[fit] + beside + beside.T + torch.diag(noise(width) * std.gram)
    each = torch.ones(classes, dtype=torch.float64)
    sums = NoisedSums(
        gram,
        members.T @ phi[fit] + noise(classes, width) * std.sums,
        members.sum(dim=0) + noise(classes) * std.counts,
        std.gram if blocks[0] else 0.0,
        std.sums * each,
        std.counts * each,
    )
    try:
        head = noised_gaussian(sums)
    except DataError:
        return 1 / classes
    return float((head.scores(phi[asked]).argmax(dim=1) == y[asked]).double().mean())


def cells(pack: Path) -> Iterator[dict[str, Any]]:
    widths = (24, 48, 96, 192)
    by_width, coarse = cifar(pack, widths)
    settings = [("digits", 64, *digits())] + [("cifar100", w, by_width[w], coarse) for w in widths]
    for name, width, phi, y in settings:
        for strength in STRENGTHS:
            for blocks in (BLOCKS, MEANS):
                found = [accuracy(phi, y, strength, blocks, draw) for draw in range(DRAWS)]
                yield {
                    "data": name,
                    "width": width,
                    "strength": strength,
                    "blocks": list(blocks),
                    "accuracy": round(100 * float(np.mean(found)), 2),
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/private_sums_choice.json"))
    asked = parser.parse_args()
    record = {"cells": list(cells(asked.pack)), "draws": DRAWS, "versions": versions(), "machine": machine()}
    replace_file(asked.results, (json.dumps(record, indent=1) + "\n").encode())
    for cell in record["cells"]:
        print(*cell.values())


if __name__ == "__main__":
    main()
