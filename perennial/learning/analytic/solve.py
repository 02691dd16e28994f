"""Heads in closed form: ridge regression on class indicators, and the Gaussian classifier.

Hoerl and Kennard 1970; AFL (arXiv 2405.16240) and ACIL (NeurIPS 2022) for ridge as a continual learner; the
shared-covariance Gaussian is linear discriminant analysis, as FeCAM (arXiv 2309.14062) uses it.

Shapes: D features with the appended constant, C classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from perennial.foundation.errors import DataError
from perennial.learning.analytic.statistics import (
    WEIGHT,
    Statistics,
    choose_adding_device,
    require_width,
    unpack_triangle,
)
from perennial.models.class_means import NEVER
from perennial.models.feature_maps.projection import CONSTANT, GRID

HeadName = Literal["ridge", "balanced_ridge", "gaussian", "auto"]
LEAST_VARIANCE = 1e-12
"""Least variance of a feature that is used; below it the covariance would be singular."""
REFINEMENTS = 2
LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]


@dataclass(frozen=True)
class Sums:
    """Statistics as float64.

    gram: (D, D) sum of phi phi^T. sums: (C, D) sum of phi over each class.
    counts: (C,) samples of each class, weighted if the sums are. constant: phi's last value.
    samples: number of samples behind weighted sums, whose counts do not say it; None for plain ones.
    """

    gram: Tensor
    sums: Tensor
    counts: Tensor
    constant: float = CONSTANT
    samples: int | None = None
    noise: float = 0.0
    """Standard deviation of the noise on gram's diagonal, on sums and on counts, all releases together."""

    @classmethod
    def of(cls, statistics: Statistics, *, samples: int | None = None) -> "Sums":
        """Convert statistics to float64.

        samples: number of samples if the statistics are weighted (each counts w_c times); None if not.
        """
        unit = 1 if samples is None else WEIGHT
        gram = unpack_triangle(statistics.gram, statistics.width)
        return cls(
            gram if unit == 1 else gram.div_(unit),
            statistics.sums.double() / (GRID * unit),
            statistics.counts.double() / unit,
            samples=samples,
        )

    def move_to(self, device: torch.device | None) -> "Sums":
        """The same sums on the device that solves heads: `device` if it is a CUDA GPU, else the processor."""
        place = choose_adding_device(device)
        if place == self.gram.device:
            return self
        return replace(self, gram=self.gram.to(place), sums=self.sums.to(place), counts=self.counts.to(place))

    def add_scaled(self, other: "Sums", times: float) -> "Sums":
        """self + times * other, for sums without noise and without class weights."""
        return Sums(
            self.gram + times * other.gram,
            self.sums + times * other.sums,
            self.counts + times * other.counts,
            self.constant,
        )

    def of_features(self, places: Tensor) -> "Sums":
        """The sums of some of the features, (k,) indices, with the constant."""
        kept = torch.cat([places, torch.tensor([len(self.gram) - 1])])
        return replace(self, gram=self.gram[kept][:, kept], sums=self.sums[:, kept])

    @property
    def least_penalty(self) -> float:
        """The least penalty that ridge uses: about the largest eigenvalue of the noise."""
        return math.sqrt(2 * len(self.gram)) * self.noise

    @property
    def total(self) -> float:
        return float(self.counts.sum())

    @property
    def number(self) -> float:
        """Number of samples, each counted once whatever its weight."""
        return self.total if self.samples is None else float(self.samples)


@dataclass(frozen=True)
class LinearHead:
    """scores = weight phi + bias. weight: (C, D - 1) float64, without the constant; bias: (C,)."""

    weight: Tensor
    bias: Tensor

    def scores(self, features: Tensor) -> Tensor:
        """(B, C) scores of (B, D - 1) features, in float64."""
        return features.double() @ self.weight.T + self.bias

    def list_tensors(self) -> dict[str, Tensor]:
        """head.weight and head.bias of a saved model, in float32.

        What all classes have in common is taken away first: it changes no prediction and no softmax, and
        would cost digits.
        """
        held = self.bias > NEVER
        weight, bias = self.weight.clone(), self.bias.clone()
        if held.any():
            weight[held] -= weight[held].mean(dim=0)
            bias[held] -= bias[held].mean()
        return {"head.weight": weight.float(), "head.bias": bias.float()}


def solve_ridge(sums: Sums, shrinkage: float, standardise: bool = False) -> LinearHead:
    """Solve ridge regression on class indicators: W = (G + lambda m I)^-1 S^T with m = trace(G) / D.

    shrinkage: lambda. standardise: scale features to mean 0 and deviation 1, taken from the sums; the bias
    then has no penalty. Weighted sums give class-balanced ridge. A class without samples is never predicted.
    """
    if standardise:
        return _standardise(sums).head(shrinkage)
    require_width(len(sums.gram))
    penalty = max(shrinkage * float(sums.gram.trace()) / len(sums.gram), sums.least_penalty)
    solution = solve(_raise_diagonal(sums.gram, penalty), sums.sums.T).T
    return _of_known(solution[:, :-1], solution[:, -1] * sums.constant, sums.counts)


def solve_gaussian(sums: Sums, shrinkage: float) -> LinearHead:
    """Linear discriminants from class means and one within-class covariance.

    shrinkage: gamma of the covariance (1 - gamma) Sigma + gamma diag(Sigma). Classes are treated
    alike, whatever their frequency. Raises DataError when there are not more samples than classes.
    """
    means, covariance, held = estimate_within_class(sums)
    varies = covariance.diagonal() > LEAST_VARIANCE
    if not varies.any():
        raise DataError("gaussian head: no feature varies within a class, so there is no covariance")
    weight = torch.zeros(len(sums.counts), len(covariance), dtype=torch.float64, device=held.device)
    bias = torch.full((len(sums.counts),), NEVER, dtype=torch.float64, device=held.device)
    kept = covariance if varies.all() else covariance[varies][:, varies]
    del covariance
    diagonal = kept.diagonal().clone()
    kept *= 1 - shrinkage
    kept.diagonal().copy_(diagonal)
    directions = solve(kept, means[:, varies].T).T
    rows = torch.zeros(len(means), weight.shape[1], dtype=torch.float64, device=held.device)
    rows[:, varies] = directions
    weight[held] = rows
    bias[held] = -0.5 * (means * rows).sum(dim=1)
    return LinearHead(weight.cpu(), bias.cpu())


def estimate_within_class(sums: Sums) -> tuple[Tensor, Tensor, Tensor]:
    """(means (C', D - 1), covariance (D - 1, D - 1), held (C,) bool) of the C' classes with samples."""
    held = sums.counts > 0
    counts, total = sums.counts[held], sums.total
    if total <= len(counts):
        raise DataError(
            f"gaussian head: found {total:.0f} samples of {len(counts)} classes, whose spread within a class "
            "cannot be estimated; allowed more samples than classes"
        )
    means = sums.sums[held, :-1] / counts[:, None]
    covariance = (means * counts[:, None]).T @ means
    torch.sub(sums.gram[:-1, :-1], covariance, out=covariance)
    covariance /= total - len(counts)
    return means, covariance, held


def estimate_oracle_shrinkage(sums: Sums) -> float:
    """The gaussian head's shrinkage with the least expected error of the covariance, from the sums alone.

    As Ledoit and Wolf's, of features brought to deviation 1 within a class; their fourth moments are taken
    for a normal distribution's, since sums do not hold them (OAS, Chen et al., IEEE TSP 2010).
    Raises DataError when there are not more samples than classes.
    """
    means, covariance, _ = estimate_within_class(sums)
    varies = covariance.diagonal() > LEAST_VARIANCE
    deviation = covariance.diagonal()[varies].sqrt()
    correlation = covariance[varies][:, varies] / torch.outer(deviation, deviation)
    width, freedom = len(correlation), sums.total - len(means)
    squares = float(correlation.square().sum())
    most = (freedom + 1 - 2 / max(width, 1)) * (squares - width)
    least = (1 - 2 / max(width, 1)) * squares + width**2
    return min(1.0, max(least / most, 1e-4)) if most > 0 else 1.0


@dataclass(frozen=True)
class _Standardised:
    """Ridge regression of features with mean 0 and deviation 1: gram (d, d), sums (C, d) of them."""

    gram: Tensor
    sums: Tensor
    mean: Tensor
    deviation: Tensor
    counts: Tensor

    def head(self, shrinkage: float) -> LinearHead:
        penalty = shrinkage * float(self.gram.trace()) / len(self.gram)
        weight = solve(_raise_diagonal(self.gram, penalty), self.sums.T).T / self.deviation
        bias = self.counts / self.counts.sum() - weight @ self.mean
        return _of_known(weight, bias, self.counts)


def _standardise(sums: Sums) -> _Standardised:
    require_width(len(sums.gram))
    total = sums.total
    mean = sums.gram[-1, :-1] / (sums.constant * total)
    centred = sums.gram[:-1, :-1] - total * torch.outer(mean, mean)
    variance = centred.diagonal() / total
    # a feature that does not vary gets no weight: its centred sums are 0
    deviation = torch.where(variance > LEAST_VARIANCE, variance.clamp(min=0).sqrt(), torch.inf)
    centred /= deviation[:, None]
    centred /= deviation[None, :]
    rows = (sums.sums[:, :-1] - sums.counts[:, None] * mean) / deviation
    return _Standardised(centred, rows, mean, deviation, sums.counts)


def compute_gcv(sums: Sums, shrinkages: Sequence[float], standardise: bool = False) -> list[float]:
    """Generalised cross-validation scores of ridge for each shrinkage, from the sums alone; least is best.

    Golub, Heath and Wahba 1979. The matrix of products is brought to tridiagonal form once, from which each
    shrinkage's residuals and the trace of its hat matrix follow at little cost. Class-balanced ridge weighs
    samples and counts them unweighted. Raises DataError if the sums have no solution.
    """
    from scipy.linalg import eigvalsh_tridiagonal, solveh_banded

    gram, rows, energy, fitted = sums.gram, sums.sums, sums.total, 0.0
    if standardise:
        inner = _standardise(sums)
        gram, rows, fitted = inner.gram, inner.sums, 1.0
        energy -= float(sums.counts.square().sum()) / sums.total
    unit = float(gram.trace()) / len(gram)
    try:
        diagonal, beside, turned = _reduce_to_tridiagonal(gram.cpu().numpy(), rows.cpu().numpy().T)
        values = np.asarray(eigvalsh_tridiagonal(diagonal, beside)).clip(0)
        banded = [np.stack([diagonal + s * unit, np.append(beside, 0.0)]) for s in shrinkages]
        solutions = [solveh_banded(matrix, turned, lower=True) for matrix in banded]
    except (np.linalg.LinAlgError, ValueError) as error:
        raise DataError(f"cross-validation: the sums have no ridge solution ({error})") from None
    scores = []
    for shrinkage, solved in zip(shrinkages, solutions, strict=True):
        penalty = shrinkage * unit
        rss = energy - float((turned * solved).sum()) - penalty * float(np.square(solved).sum())
        freedom = 1 - (fitted + float((values / (values + penalty)).sum())) / sums.number
        scores.append((rss / sums.number) / freedom**2)
    return scores


def choose_by_gcv(sums: Sums, shrinkages: Sequence[float], standardise: bool = False) -> float:
    """The shrinkage with the lowest cross-validation score, of equals the largest. Raises as gcv does."""
    scores = compute_gcv(sums, shrinkages, standardise)
    return max(zip([-score for score in scores], shrinkages, strict=True))[1]


def _reduce_to_tridiagonal(
    matrix: np.ndarray, right: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(diagonal (D,), beside it (D - 1,), Q^T right (D, C)) of T = Q^T matrix Q, which is tridiagonal.

    matrix: (D, D), symmetric. A third of the work of all its eigenvectors.
    """
    from scipy.linalg import get_lapack_funcs

    names = ("sytrd", "sytrd_lwork", "ormqr")
    sytrd, sytrd_lwork, ormqr = get_lapack_funcs(names, dtype="float64")
    size = len(matrix)
    room = int(sytrd_lwork(size, lower=1)[0])
    reflectors, diagonal, beside, scales, _ = sytrd(np.asfortranarray(matrix), lower=1, lwork=room)
    turned = np.asfortranarray(right)
    if size > 1:
        # Q is 1 and, below and beside it, what the reflectors make up as in a QR decomposition
        lower = np.asfortranarray(reflectors[1:, :-1])
        room = int(ormqr("L", "T", lower, scales, turned[1:], -1)[1][0])
        turned = np.vstack([turned[:1], ormqr("L", "T", lower, scales, turned[1:], room)[0]])
    return diagonal, beside, turned


def solve(matrix: Tensor, right: Tensor) -> Tensor:
    """X of matrix X = right, for a symmetric positive definite matrix (D, D), right (D, C), in float64.

    Cholesky with iterative refinement. Raises DataError when the matrix is not positive definite.
    """
    require_width(len(matrix))
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed):
        raise DataError(
            "closed-form head: the matrix of products is singular; allowed: a larger shrinkage, or more "
            "samples than features"
        )
    solution = torch.cholesky_solve(right, factor)
    for _ in range(REFINEMENTS):
        solution += torch.cholesky_solve(right - matrix @ solution, factor)
    return solution


def _raise_diagonal(gram: Tensor, penalty: float) -> Tensor:
    raised = gram.clone()
    raised.diagonal().add_(penalty)
    return raised


def _of_known(weight: Tensor, bias: Tensor, counts: Tensor) -> LinearHead:
    known = counts > 0
    weight = torch.where(known[:, None], weight, torch.zeros_like(weight))
    return LinearHead(weight.cpu(), torch.where(known, bias, torch.full_like(bias, NEVER)).cpu())
