"""Checks whether sums could be those of some records, before they are added to others.

A record's features have length 1/sqrt(2) but for rounding, and a constant beside them. From that follow the
trace of the products, the length of each class's sum, and that what products have beyond the class means is
positive semi-definite. What passes is the sum of some really weighted set of vectors of that length (the
rank-one decomposition of Sturm and Zhang 2003): who passes with invented sums has at most other data.

Shapes: d features without the constant, C classes.
"""

import math
from typing import Protocol

import torch

from perennial.learning.analytic.statistics import Statistics, unpacked
from perennial.models.feature_maps.ball import CONSTANT, GRID, RADIUS

SLACK = 2.0**-44
"""Of Cholesky's rounding, for each feature and record; 512 times its bound."""
DEVIATIONS = 8.0
"""Standard deviations that noise is allowed: beyond them one honest value of 10^15 lies."""


class Deviations(Protocol):
    """Standard deviations of noise on the diagonal of gram (1/sqrt 2 above it), on sums, and on counts."""

    @property
    def gram(self) -> float: ...
    @property
    def sums(self) -> float: ...
    @property
    def counts(self) -> float: ...


def least_trace(features: int) -> float:
    """Least trace of the products of one record of `features` features and the constant; the largest is 1.

    Each value is rounded towards zero to 2^-16, and lengths are computed in single precision.
    """
    shortest = RADIUS - math.sqrt(features) / GRID
    return CONSTANT**2 + shortest**2 - 2.0**-20


def fault_of(found: Statistics) -> str:
    """Why no records can have such sums, in words; '' if some could.

    Does not check the constant's sums and the counts, which are checked in whole numbers elsewhere. Weighted
    sums are compared with their weighted counts.
    """
    counts, features = found.counts.double(), found.width - 1
    sums, gram = found.sums.double() / GRID, unpacked(found.gram, found.width)
    trace, total = float(gram.trace()), float(counts.sum())
    least, most = total * least_trace(features), total * (1 + 1e-12)
    if not least <= trace <= most:
        return f"a trace of {trace:.6g}, where that many records have {least:.6g} to {most:.6g}"
    lengths = torch.linalg.vector_norm(sums[:, :-1], dim=1)
    if bool((lengths > counts * RADIUS * (1 + 1e-9)).any()):
        return "the sum of a class longer than its records can make it"
    held = counts > 0
    rows = sums[held, :-1] / counts[held, None].sqrt()
    within = gram[:-1, :-1] - rows.T @ rows
    within.diagonal().add_(features * max(total, 1.0) * SLACK)
    return "" if _is_positive(within) else "products of features that are no sum of squares"


def fault_under_noise(found: Statistics, noise: Deviations) -> str:
    """Why no records can have such noised sums, in words; '' if some could, within DEVIATIONS of the noise.

    found: sums without the constant, counts in steps of 2^-16; gram may be empty.
    """
    counts, features = found.counts.double() / GRID, found.width
    sums = found.sums.double() / GRID
    if float(counts.min()) < -DEVIATIONS * noise.counts:
        return "counts below 0, beyond the noise"
    lengths = torch.linalg.vector_norm(sums, dim=1)
    reach = (counts + DEVIATIONS * noise.counts).clamp(min=0) * RADIUS
    if bool((lengths > reach + noise.sums * (math.sqrt(features) + DEVIATIONS)).any()):
        return "the sum of a class longer than its records can make it, beyond the noise"
    if not found.gram.numel():
        return ""
    gram, total = unpacked(found.gram, features), float(counts.sum())
    doubt = DEVIATIONS * (noise.gram * math.sqrt(features) + noise.counts * math.sqrt(len(counts)))
    # products were rounded to 2^-17 before noise was added
    rounded = features / GRID * max(total, 1.0)
    least = total * (least_trace(features) - CONSTANT**2) - doubt - rounded
    most = total / 2 + doubt
    trace = float(gram.trace())
    if not least <= trace <= most:
        return f"a trace of {trace:.6g}, where that many records have {least:.6g} to {most:.6g} with noise"
    # the largest eigenvalue of such noise
    allowance = noise.gram * (math.sqrt(2 * features) + DEVIATIONS) + rounded
    gram.diagonal().add_(allowance + features * max(total, 1.0) * SLACK)
    return "" if _is_positive(gram) else "products that are no sum of squares, beyond the noise"


def _is_positive(matrix: torch.Tensor) -> bool:
    return not int(torch.linalg.cholesky_ex(matrix)[1])
