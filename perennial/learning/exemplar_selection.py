"""Exemplar memory: which samples of each class a site keeps, and in which order.

A list is in order of importance, so that its prefix is the choice for a smaller budget.
"""

import numpy as np
import torch
from torch import Tensor

from perennial.data.splits import below


def _checked(features: Tensor, budget: int) -> int:
    if len(features) == 0:
        raise ValueError("exemplars of an empty class")
    if budget < 1:
        raise ValueError(f"exemplar budget: found {budget}, allowed 1 or more")
    return min(budget, len(features))


def herding(features: Tensor, budget: int) -> Tensor:
    """Indices of the samples whose running mean stays closest to the class mean.

    features: (n, d), one class, rows of unit length.
    Returns (min(budget, n),) int64, most important first, so that a prefix is the choice
    for a smaller budget.
    Raises ValueError on an empty class or a budget below 1.

    Rebuffi et al. 2017 (arXiv 1611.07725), algorithm 4.
    """
    size = _checked(features, budget)
    features = features.double()
    mean = features.mean(dim=0)
    total = torch.zeros_like(mean)
    free = torch.ones(len(features), dtype=torch.bool, device=features.device)
    chosen = []
    for step in range(1, size + 1):
        distance = ((total + features) / step - mean).square().sum(dim=1)
        # the first minimum: torch.argmin does not promise which of several equal ones it returns
        distance = distance.masked_fill(~free, torch.inf)
        index = int((distance == distance.min()).nonzero()[0])
        chosen.append(index)
        free[index] = False
        total += features[index]
    return torch.tensor(chosen, dtype=torch.int64)


def nearest(features: Tensor, budget: int) -> Tensor:
    """Indices of the samples closest to the class mean, closest first; shapes and errors as herding."""
    size = _checked(features, budget)
    features = features.double()
    distance = (features - features.mean(dim=0)).square().sum(dim=1)
    return torch.sort(distance, stable=True).indices[:size].cpu()


def random_by_hash(hashes: np.ndarray, budget: int) -> Tensor:
    """Indices of the samples with the smallest keyed hash.

    The choice does not depend on any property of a sample, but one more sample can displace another.

    hashes: (n,) uint64.
    Returns (min(budget, n),) int64, smallest hash first.
    Raises ValueError on an empty class or a budget below 1.
    """
    size = _checked(torch.empty(len(hashes), 0), budget)
    return torch.from_numpy(np.argsort(hashes, kind="stable")[:size])


def share_by_hash(hashes: np.ndarray, share: float) -> Tensor:
    """Indices of the samples whose keyed hash is among the lowest `share` of all possible hashes.

    Adding or removing a sample does not change whether another one is chosen.

    hashes: (n,) uint64, equal for samples of one patient, which are kept together.
    Returns (k,) int64, smallest hash first; k is about share * n and can be 0.
    """
    order = np.argsort(hashes, kind="stable")
    return torch.from_numpy(order[below(hashes[order], share)])
