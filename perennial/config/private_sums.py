"""Which map, how many components and which blocks noised sums take: for `init`, and for docs/private_sums.md.

Everything follows from public numbers. `strength` is records over the noise multiplier times the root of the
releases that are added up; its limits are those of `benchmarks/results/private_sums_choice.json`.
"""

import math
from dataclasses import dataclass
from typing import Any

from perennial.foundation.errors import ConfigError
from perennial.privacy.budget import Budget
from perennial.privacy.noised_sums import BLOCKS, Blocks

MEANS_ALONE: Blocks = (0.0, 1.0, 0.2)
LEAST_A_CLASS = 60.0
"""Strength for each class below which products of features are more noise than they are worth."""
COMPONENTS = ((3000.0, 192), (1000.0, 48), (0.0, 24))
"""Least strength -> components of each map of images."""
PATCHES_SIDE = 16
"""Pixels below which the pixels themselves serve as well as patches."""
ROUNDED = 100


@dataclass(frozen=True)
class PrivateSums:
    """Advice for an experiment with noise on sums: its blocks, and the reasons for them in words."""

    model: dict[str, Any]
    strategy: dict[str, Any]
    privacy: dict[str, Any]
    reasons: tuple[str, ...]


def private_sums(
    shape: tuple[int, ...],
    records: int,
    classes: int,
    epsilon: float,
    *,
    sites: int,
    tasks: int = 1,
    delta: float = 1e-5,
) -> PrivateSums:
    """Choose map, width and weights of the blocks for sums to which each site adds its own noise.

    shape: of one record, images (C, H, W) or (D,). records: training records of all sites, roughly, as a
    public number.
    tasks: releases of each site. epsilon, delta: of each record. Raises ConfigError for fewer than one
    record, class, site or task.
    """
    if min(records, classes, sites, tasks) < 1:
        raise ConfigError(
            f"private sums: found {records} records, {classes} classes, {sites} sites, {tasks} tasks; "
            "allowed: 1 or more of each"
        )
    multiplier = Budget(epsilon, delta, None, 1.0, 1).solve("rdp").noise_multiplier
    assert multiplier is not None
    multiplier = math.ceil(multiplier * ROUNDED) / ROUNDED
    strength = records / (multiplier * math.sqrt(sites * tasks))
    whole = strength >= LEAST_A_CLASS * classes
    privacy: dict[str, Any] = {
        "mode": "sample",
        "release": "sums",
        "noise_multiplier": multiplier,
        "delta": delta,
        "accountant": "rdp",
    }
    if not whole:
        privacy["blocks"] = list(MEANS_ALONE)
    reasons = [
        f"{records} records beside the noise of {sites * tasks} releases at epsilon {epsilon:g}: strength "
        f"{strength:.0f}",
        f"blocks {', '.join(f'{weight:g}' for weight in (BLOCKS if whole else MEANS_ALONE))}: "
        + ("products are worth their noise" if whole else "products would be more noise than they are worth"),
    ]
    model: dict[str, Any] = {"name": "features", "features": [{"name": "inputs"}]}
    if len(shape) == 3 and min(shape[1:]) >= PATCHES_SIDE:
        width = next(components for least, components in COMPONENTS if strength >= least)
        patches = {"name": "patches", "filters": 400, "size": 8, "symmetry": "mirror", "power": 0.5}
        model = {"name": "features", "features": [patches], "projection": width}
        reasons.append(f"{width} components of patches: more would be noise")
    return PrivateSums(model, {"name": "analytic", "head": "gaussian"}, privacy, tuple(reasons))
