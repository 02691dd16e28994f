"""Moves digests apart by as much as mixing has drawn them together.

A digest of S samples of one class has that class's mean, and 1/S of its variance: a model that learns from
such digests has never seen how far single samples stray, which is what it will be asked about. Moving each
digest away from the mean of its class's digests gives the class its spread back. It needs nothing more from
the sites, and what is computed from a protected release costs no privacy. Not in Hsu, Chang and Chen 2022
(arXiv 2210.00737).

Symbols: D digests, S samples in a digest, M classes.
"""

import torch
from torch import Tensor

from perennial.privacy.digest_config import DigestConfig

PURE = 1 - 1e-6
"""A digest with at least this share of one class is of that class alone."""


def spread_factor(config: DigestConfig) -> float:
    """1 / sqrt(sum_j w_j^2): how much further from their class's mean samples lie than digests.

    sqrt(S) for equal weights.
    """
    if config.weights is not None:
        squares = sum(weight * weight for weight in config.weights)
    else:
        squares = 1 / config.per_digest
    return squares**-0.5


def spread(features: Tensor, labels: Tensor, factor: float) -> Tensor:
    """Move digests of a single class away from their class's mean, to `factor` times the distance.

    features: (D, ...) of one site. labels: (D, M). Returns (D, ...), never below 0, as features are; digests
    of several classes stay as they are.
    """
    share, label = labels.max(dim=1)
    one_hot = torch.nn.functional.one_hot(label, labels.shape[1]).to(features.dtype)
    one_hot = one_hot * (share >= PURE).unsqueeze(1)
    rows = features.flatten(1)
    means = one_hot.T @ rows / one_hot.sum(dim=0).clamp_min(1).unsqueeze(1)
    moved = (means[label] + factor * (rows - means[label])).clamp_min(0)
    return torch.where((share >= PURE).unsqueeze(1), moved, rows).view_as(features)
