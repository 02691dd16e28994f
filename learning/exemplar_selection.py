"""Exemplar memory: which samples of each class a site keeps, and in which order.

A list is in order of importance, so that its prefix is the choice for a smaller budget.
"""

import hashlib

import torch
from torch import Tensor


def _checked(features: Tensor, budget: int) -> int:
    if len(features) == 0:
        raise ValueError("exemplars of an empty class")
    if budget < 1:
        raise ValueError(f"exemplar budget: found {budget}, allowed 1 or more")
    return min(budget, len(features))


def herding(features: Tensor, budget: int) -> Tensor:
    """Indices of the samples whose running mean stays closest to the class mean.

    features: (n, d), one class, rows of unit length.
    Returns (min(budget, n),) int64, most important first, so that a prefix is the choice for a smaller
    budget.
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


def random_by_hash(sample_hashes: list[str], budget: int, seed: int) -> Tensor:
    """Indices of the samples with the smallest keyed hash: no property of the samples counts, but one more
    sample can displace another.

    sample_hashes: one content hash for each sample. Returns (min(budget, n),) int64.
    """
    size = _checked(torch.empty(len(sample_hashes), 0), budget)
    ranks = [hashlib.sha256(f"{seed}:{digest}".encode()).digest() for digest in sample_hashes]
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    return torch.tensor(order[:size], dtype=torch.int64)


def share_by_hash(sample_hashes: list[str], share: float, seed: int) -> Tensor:
    """Indices of the samples whose keyed hash, read as a number in [0, 1), is below share.

    Each sample's fate is its own: adding or removing another changes nothing. Returns (k,) int64, k about
    share * n, perhaps 0, smallest hash first.
    """
    values = [
        int.from_bytes(hashlib.sha256(f"{seed}:{digest}".encode()).digest()[:8]) / 2**64
        for digest in sample_hashes
    ]
    kept = [index for index in range(len(values)) if values[index] < share]
    return torch.tensor(sorted(kept, key=values.__getitem__), dtype=torch.int64)
