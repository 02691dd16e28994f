"""Heads from sums that left with noise, of which nothing but the noised sums and the noise's size is used.

Everything here is post-processing, so it costs no privacy. Its constants are public and the same at every
epsilon. Noised sums have no row for the appended constant (privacy/noised_sums.py).

Shapes: D features without the constant, C classes.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from perennial.foundation.errors import DataError
from perennial.learning.analytic.solve import LinearHead, Sums, solve
from perennial.learning.analytic.statistics import Statistics, unpack_triangle
from perennial.models.class_means import NEVER
from perennial.models.feature_maps.projection import CONSTANT, GRID

LEAST_RIDGE = 0.1
"""Added to the covariance, in its mean eigenvalue."""
NOISE_RIDGE = 0.5
"""Added to the covariance, in the largest eigenvalue that the noise alone would have."""
CERTAIN = 2.0
"""Standard deviations of its noise by which a class's count must exceed 0 to be believed."""


@dataclass(frozen=True)
class NoisedSums:
    """Sums that left with noise, as float64.

    gram: (D, D) sum of phi phi^T; None where no products were released. sums: (C, D). counts: (C,).
    gram_noise: standard deviation on gram's diagonal, of all releases together; 1/sqrt 2 of it beside it.
    sums_noise, counts_noise: (C,) of each class's sum and count; 0 for a class of which nothing was released.
    """

    gram: Tensor | None
    sums: Tensor
    counts: Tensor
    gram_noise: float
    sums_noise: Tensor
    counts_noise: Tensor

    @classmethod
    def of(
        cls,
        statistics: Statistics,
        gram_noise: float,
        sums_noise: Tensor,
        counts_noise: Tensor,
    ) -> "NoisedSums":
        """Convert statistics to float64. Counts are in steps of 2^-16, noise in units of the values."""
        products = len(statistics.gram) > 0
        return cls(
            unpack_triangle(statistics.gram, statistics.width) if products else None,
            statistics.sums.double() / GRID,
            statistics.counts.double() / GRID,
            gram_noise,
            sums_noise,
            counts_noise,
        )

    @property
    def released(self) -> Tensor:
        """(C,) bool: classes of which something was released."""
        return self.counts_noise > 0

    @property
    def uncertain(self) -> Tensor:
        """(C,) bool: released classes whose count is below two standard deviations of its noise."""
        return self.released & (self.counts < CERTAIN * self.counts_noise)

    def prepare_for_ridge(self) -> Sums:
        """The sums as ridge() takes them: with the constant's row, and without negative eigenvalues.

        Raises DataError if no products were released.
        """
        if self.gram is None:
            raise DataError("head ridge needs sums of products, whose block weight is 0; allowed: gaussian")
        width = len(self.gram)
        counts = self.counts.clamp(min=1)
        gram = torch.empty(width + 1, width + 1, dtype=torch.float64)
        gram[:-1, :-1] = self.gram
        gram[-1, :-1] = gram[:-1, -1] = self.sums.sum(dim=0) * CONSTANT
        gram[-1, -1] = counts.sum() * CONSTANT**2
        values, vectors = torch.linalg.eigh(gram)
        gram = (vectors * values.clamp(min=0)) @ vectors.T
        sums = torch.cat([self.sums, counts[:, None] * CONSTANT], dim=1)
        return Sums((gram + gram.T) / 2, sums, counts, noise=self.gram_noise)

    def estimate_counts(self) -> Tensor:
        """(C',) counts of the C' released classes, shrunk towards their mean by as much as noise explains.

        Each is at least twice its noise, or the mean if that is less. Raises DataError if the noise
        leaves no samples at all.
        """
        counts, noise = self.counts[self.released], self.counts_noise[self.released]
        mean = counts.mean()
        if float(mean) <= 0:
            raise DataError("the noise on the sums leaves no samples: a larger epsilon, or more samples")
        explained = noise.square()
        spread = (counts.var(correction=0) - explained.mean()).clamp(min=0)
        drawn = mean + spread / (spread + explained) * (counts - mean)
        return torch.maximum(drawn, torch.minimum(CERTAIN * noise, mean))

    def estimate_means(self, counts: Tensor) -> Tensor:
        """(C', D) class means, shrunk towards the mean of all by as much as noise explains their differences.

        James and Stein 1961, with its positive part. counts: (C',) as estimated_counts gives them.
        """
        sums, noise = self.sums[self.released], self.sums_noise[self.released]
        centre = sums.sum(dim=0) / counts.sum()
        apart = sums / counts[:, None] - centre
        of_noise = sums.shape[1] * (noise / counts).square()
        kept = (1 - of_noise / apart.square().sum(dim=1).clamp(min=1e-300)).clamp(min=0)
        return centre + kept[:, None] * apart

    def estimate_covariance(self, counts: Tensor, means: Tensor) -> Tensor:
        """(D, D) covariance within classes, its eigenvalues raised by about the size of the noise.

        Without released products it is the identity, with which a Gaussian head takes the nearest class mean.
        """
        if self.gram is None:
            return torch.eye(means.shape[1], dtype=torch.float64)
        total = counts.sum()
        share = counts / total
        within = self.gram / total - (means * share[:, None]).T @ means
        values, vectors = torch.linalg.eigh((within + within.T) / 2)
        values = values.clamp(min=0)
        values += NOISE_RIDGE * math.sqrt(2 * len(values)) * self.gram_noise / float(total)
        values += LEAST_RIDGE * values.mean()
        return (vectors * values) @ vectors.T


def solve_noised_gaussian(sums: NoisedSums) -> LinearHead:
    """Linear discriminants from noised sums: w_c = Sigma^-1 mu_c, b_c = -mu_c . w_c / 2.

    Classes are treated alike. One of which nothing was released is never predicted.
    Raises DataError where the noise leaves no samples.
    """
    counts = sums.estimate_counts()
    means = sums.estimate_means(counts)
    directions = solve(sums.estimate_covariance(counts, means), means.T).T
    weight = torch.zeros_like(sums.sums)
    bias = torch.full((len(sums.counts),), NEVER, dtype=torch.float64)
    weight[sums.released] = directions
    bias[sums.released] = -0.5 * (means * directions).sum(dim=1)
    return LinearHead(weight, bias)
