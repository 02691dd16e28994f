"""Checks whether a site's sums can be true."""

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from perennial.config.experiment import Experiment
from perennial.config.secure_words import share_of_noise
from perennial.foundation.errors import ProtocolError
from perennial.learning.analytic.compact import read_compact
from perennial.learning.analytic.noised import NoisedSums
from perennial.learning.analytic.statistics import Statistics, SumsForm, unpack_triangle
from perennial.models.feature_maps.projection import CONSTANT, CONSTANT_STEPS, GRID, RADIUS, RADIUS_SQUARED
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.noised_sums import SumsNoise
from perennial.protocol.stamp import MAX_EXAMPLES
from perennial.protocol.tensors import Tensors
from perennial.strategies.round.context import RunContext

MOST_NOISED = 1 << 56


def read_statistics(tensors: Tensors, form: SumsForm, classes: range) -> Statistics:
    """Read the statistics in a reply. form: the one that was asked for.

    Raises ProtocolError naming the tensor that is missing, unknown, of another shape or another type.
    """
    tensors = Tensors(read_compact(tensors, form, classes))
    shapes = form.list_shapes(len(classes))
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != shapes:
        raise ProtocolError(f"StatisticsReply: statistics: found {found}, expected {shapes}")
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int64:
            raise ProtocolError(f"StatisticsReply: statistics: {name}: found {tensor.dtype}, allowed int64")
    gram, sums, counts = (tensors[name].cpu() for name in shapes)
    return Statistics(gram, sums, counts, classes)


def check_exact(found: Statistics, weight: list[int] | None = None, sites: int = 1) -> None:
    """Raise ProtocolError if no samples can have these sums; for sums without noise.

    sites: number of sites whose sums they are, added up.
    weight: of each class, in class-balanced statistics, whose counts are weighted too.
    """
    counts = found.counts
    most = sites * MAX_EXAMPLES * (1 if weight is None else max(weight, default=0))
    if bool((counts < 0).any()) or bool((counts > most).any()):
        raise _make_error("counts", "below 0 or beyond what a site can hold")
    if weight is not None and any(
        count % share if share else count for count, share in zip(counts.tolist(), weight, strict=True)
    ):
        raise _make_error("counts", "no multiples of the class weights")
    reach = counts[:, None] * GRID
    # abs() of the least integer is itself, and below 0
    if bool((found.sums > reach).any()) or bool((found.sums < -reach).any()):
        raise _make_error("sums", "a sum beyond what its samples can reach")
    if not torch.equal(found.sums[:, -1], counts * CONSTANT_STEPS):
        raise _make_error("sums", "a constant that is not the constant's")
    last = _locate_diagonal(found.width) + torch.arange(found.width - 1, -1, -1)
    if not torch.equal(found.gram[last], found.sums.sum(dim=0) * CONSTANT_STEPS):
        raise _make_error("gram", "products with the constant that are not the sums times it")
    if fault := find_fault(found):
        raise _make_error("gram, sums, counts", fault)


class Deviations(Protocol):
    """Standard deviations of noise on the diagonal of gram (1/sqrt 2 above it), on sums, and on counts."""

    @property
    def gram(self) -> float: ...
    @property
    def sums(self) -> float: ...
    @property
    def counts(self) -> float: ...


def check_noised(found: Statistics, noise: Deviations, sites: int = 1) -> None:
    """Raise ProtocolError if no samples can have these sums under noise of these standard deviations.

    sites: number of sites whose sums they are, added up, with the noise of all.
    """
    check_range(found)
    if int(found.counts.max()) > (sites * MAX_EXAMPLES + DEVIATIONS * noise.counts) * GRID:
        raise _make_error("counts", "beyond what a site can hold")
    if fault := find_fault_under_noise(found, noise):
        raise _make_error("gram, sums, counts", fault)


def check_range(found: Statistics) -> None:
    """Raise ProtocolError if a million noised sums like these could leave 64-bit integers."""
    for name in ("gram", "sums", "counts"):
        tensor = getattr(found, name)
        # abs() of the least integer is itself, and below 0
        if tensor.numel() and (int(tensor.max()) >= MOST_NOISED or int(tensor.min()) <= -MOST_NOISED):
            raise ProtocolError(f"StatisticsReply: statistics: {name}: found 2^56 steps or more")


def _locate_diagonal(width: int) -> torch.Tensor:
    """Where each row of a packed upper triangle begins."""
    rows = torch.arange(width)
    return rows * width - rows * (rows - 1) // 2


def _make_error(name: str, what: str) -> ProtocolError:
    return ProtocolError(f"StatisticsReply: statistics: {name}: found {what}; no samples have such sums")


def choose_sums_form(features: int, privacy: PrivacyConfig) -> SumsForm:
    """The form of the sums of `features` features; under privacy without constant, maybe without products."""
    if not privacy.enabled:
        return SumsForm(features + 1)
    return SumsForm(features, products=privacy.blocks[0] > 0)


def compute_site_noise(width: int, experiment: Experiment) -> SumsNoise | None:
    """The noise on one site's sums of a task; None without privacy. width: of a row of sums."""
    privacy = experiment.privacy
    if not privacy.enabled or privacy.noise_multiplier is None:
        return None
    multiplier = share_of_noise(experiment, privacy.noise_multiplier)
    return SumsNoise.of(multiplier, width, privacy.blocks, RADIUS_SQUARED)


def attach_noise(
    total: Statistics, contributions: Mapping[int, Mapping[str, Any]], services: RunContext
) -> tuple[NoisedSums, list[str]]:
    """(the total with its noise, warnings about classes that may be noise alone).

    Products have the noise of every release, a class's sums that of its task's.

    contributions: task -> the sites whose sums are in the total.
    """
    privacy, classes = services.experiment.privacy, total.classes
    one = compute_site_noise(total.width, services.experiment)
    assert one is not None
    releases = torch.zeros(len(classes), dtype=torch.float64)
    for task, sites in contributions.items():
        of_task = services.schedule.list_classes(task)
        releases[of_task.start - classes.start : of_task.stop - classes.start] += len(sites)
    root, every = releases.sqrt(), sum(len(sites) for sites in contributions.values())
    products = one.gram * every**0.5 if privacy.blocks[0] else 0.0
    sums = NoisedSums.of(total, products, one.sums * root, one.counts * root)
    names = [str(classes.start + place) for place in sums.uncertain.nonzero().flatten().tolist()]
    said = (
        f"noise may have made all of the samples of classes {', '.join(names[:10])}"
        f"{', ...' if names[10:] else ''}: fewer than two standard deviations of it were found"
    )
    return sums, [said] if names else []


SLACK = 2.0**-44
"""Of Cholesky's rounding, for each feature and record; 512 times its bound."""
DEVIATIONS = 8.0
"""Standard deviations that noise is allowed: beyond them one honest value of 10^15 lies."""


def compute_least_trace(features: int) -> float:
    """Least trace of the products of one record of `features` features and the constant; the largest is 1.

    Each value is rounded towards zero to 2^-16, and lengths are computed in single precision.
    """
    shortest = RADIUS - math.sqrt(features) / GRID
    return CONSTANT**2 + shortest**2 - 2.0**-20


def find_fault(found: Statistics) -> str:
    """Why no records can have such sums, in words; '' if some could.

    Does not check the constant's sums and the counts, which are checked in whole numbers elsewhere. Weighted
    sums are compared with their weighted counts.
    """
    counts, features = found.counts.double(), found.width - 1
    sums, gram = found.sums.double() / GRID, unpack_triangle(found.gram, found.width)
    trace, total = float(gram.trace()), float(counts.sum())
    least, most = total * compute_least_trace(features), total * (1 + 1e-12)
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


def find_fault_under_noise(found: Statistics, noise: Deviations) -> str:
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
    gram, total = unpack_triangle(found.gram, features), float(counts.sum())
    doubt = DEVIATIONS * (noise.gram * math.sqrt(features) + noise.counts * math.sqrt(len(counts)))
    # products were rounded to 2^-17 before noise was added
    rounded = features / GRID * max(total, 1.0)
    least = total * (compute_least_trace(features) - CONSTANT**2) - doubt - rounded
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
