"""What `perennial init --epsilon` writes: an experiment from noised sums, as docs/private_sums.md advises.

Map, components and blocks follow from public numbers. `strength` is records over the noise multiplier times
the root of the releases that are added up; its limits are those of
`benchmarks/results/private_sums_choice.json`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from perennial.data.csv_file import read_csv
from perennial.data.image_survey import Survey
from perennial.data.table_columns import BadCells, count_features, encode, locate_numbers
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


def choose_private_sums(
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


HEAD = (
    "# Closed form under noise: no site trains; each sends sums of fixed features once, with noise that it",
    "# adds itself, and the server makes a classifier of the noised sums alone. The guarantee is for one",
    "# record: a patient with k records at a site is covered at about k times the epsilon. Maps, blocks and",
    "# noise follow from rough numbers of records, classes and sites (docs/private_sums.md), which count as",
    "# public: change none of them by what the records show.",
    "# Look first: perennial check FILE.",
)
TRAINED_ON = 0.8
"""Share of the records that is no test record."""
SEEN_SIDE = 32
"""Pixels of what patches see, as in the trial behind docs/private_sums.md."""


def render_policy(template: str) -> str:
    """The template's policy block with `statistics` as the only answer, and a comment that says so."""
    return (
        "# The policy of every hospital's file, but that it answers what experiment.yaml asks: sums with "
        "noise.\n# `perennial run` on one machine does not read this file.\n"
    ) + template.replace("answers: [train]\n", "answers: [statistics]\n")


def choose_private_keys(found: Survey, epsilon: float, sites: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(blocks `model`, `strategy` and `privacy` of the experiment, the reasons for them in words).

    found: the data. sites: how many. Raises ConfigError for an epsilon of 0 or less, and for image arrays not
    of 8 bits.
    """
    if not (epsilon > 0 and math.isfinite(epsilon)):
        raise ConfigError(f"--epsilon: found {epsilon}, allowed a number above 0")
    if found.source == "npz" and found.images and found.modes["deep"]:
        raise ConfigError(
            f"{found.path}: --epsilon: found images that are not of 8 bits; allowed: uint8, or a table"
        )
    # a public number, roughly
    records = max(1, int(_round_to_figure(TRAINED_ON * found.total)))
    size = choose_seen_size(found)
    shape = (1, *size) if size is not None else (count_features(found.columns) if found.columns else 1,)
    advice = choose_private_sums(shape, records, len(found.samples), epsilon, sites=sites)
    model = advice.model
    if read_by_the_map(found) and size is not None:
        model = {**model, "features": [model["features"][0] | {"image_size": list(size)}]}
    keys = {"model": model, "strategy": advice.strategy, "privacy": advice.privacy}
    return keys, advice.reasons


def render_private_keys(found: Survey, epsilon: float, sites: int) -> list[str]:
    """Lines of experiment.yaml for private_keys(), with the reasons as comments."""
    keys, reasons = choose_private_keys(found, epsilon, sites)
    written = [f"{key}: {format_yaml(value)}" for key, value in keys.items()]
    return [
        *(f"# {reason}" for reason in reasons),
        *written,
        "evaluation: {federated: false} # counts of right answers would be a release of their own",
    ]


def format_yaml(value: Any) -> str:
    """A value as flow-style YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def measure_median_size(found: Survey) -> tuple[int, int]:
    """(median height, median width) of the images that were looked at."""
    widths, heights = (sorted(side) for side in zip(*found.sizes, strict=True))
    return heights[len(heights) // 2], widths[len(widths) // 2]


def convert_tuples(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Kinds of columns with lists in place of tuples, as YAML writes them."""
    return {name: list(kind) if isinstance(kind, tuple) else kind for name, kind in columns.items()}


def choose_seen_size(found: Survey) -> tuple[int, int] | None:
    """(height, width) to which images are reduced for a feature map; None for tables."""
    if not found.images:
        return None
    height, width = measure_median_size(found)
    scale = min(1.0, max(SEEN_SIDE / max(height, width), PATCHES_SIDE / min(height, width)))
    return max(1, round(height * scale)), max(1, round(width * scale))


def read_by_the_map(found: Survey) -> bool:
    """Whether the data are images large enough for a map of patches, which then gets their size."""
    size = choose_seen_size(found)
    return size is not None and min(size) >= PATCHES_SIDE


def render_constants(found: Survey) -> list[str]:
    """Lines of the `data` block that fix constants and hold no validation samples out, with comments."""
    constants = round_constants(found)
    lines = [f"  {key}: {format_yaml(value)}" for key, value in constants.items()]
    if lines:
        lines = [
            "  # What each number becomes is (x - mean) / std. These are of this file, rounded.",
            "  # The guarantee holds only for constants, columns and categories that nobody took from the",
            "  # records: replace them by those that you would write without having seen any.",
            *lines,
        ]
    return [*lines, "  validation_fraction: 0 # nothing is chosen by records"]


def round_constants(found: Survey) -> dict[str, Any]:
    """Keys of `data` that fix what a table's inputs become: columns, means and deviations of one figure.

    Empty for images, whose constants are public.
    """
    if found.source == "csv":
        keys = {key: found.options[key] for key in ("decimal", "units", "limits") if key in found.options}
        file, columns = read_csv(found.path, **keys), found.columns
        values = encode(file, columns, (), BadCells(file))
        indices = locate_numbers(columns)
        both = {name: _round_moments(values[:, place]) for name, place in indices.items()}
        return {
            "columns": convert_tuples(columns),
            "normalise": {
                "mean": {name: mean for name, (mean, _) in both.items()},
                "std": {name: std for name, (_, std) in both.items()},
            },
        }
    if found.source == "npz" and not found.images:
        with np.load(found.path, allow_pickle=False) as file:
            both = [_round_moments(column) for column in np.asarray(file["x"], dtype=np.float64).T]
        return {"normalise": {"mean": [mean for mean, _ in both], "std": [std for _, std in both]}}
    return {}


def _round_moments(values: np.ndarray) -> tuple[float, float]:
    """(mean as a multiple of the deviation, deviation of one figure) of those numbers that are there."""
    known = values[np.isfinite(values)]
    mean, spread = (float(known.mean()), _round_to_figure(float(known.std()))) if len(known) else (0.0, 0.0)
    if spread == 0:
        return _round_to_figure(mean), 1.0
    return float(f"{round(mean / spread) * spread:.6g}"), spread


def _round_to_figure(value: float) -> float:
    return float(f"{value:.0e}")
