"""Which samples of task 1 a site trains on, before and after balanced pre-training."""

import numpy as np
import torch
from torch import Tensor

from perennial.client.site import Site
from perennial.foundation.streams import stream
from perennial.protocol.stamp import Stamp


def balanced_choice(labels: Tensor, count: int, generator: np.random.Generator) -> Tensor:
    """Sorted (count,) int64 indices into labels, (n,) int64, as evenly over classes as there are samples.

    A class that has too few gives all of them, and the others fill up. A draw decides which classes give one
    more than others. Raises ValueError unless 1 <= count <= n.
    """
    if not 1 <= count <= len(labels):
        raise ValueError(f"count: found {count}, allowed 1 to {len(labels)}")
    order = generator.permutation(len(labels))
    _, inverse, sizes = np.unique(labels.cpu().numpy()[order], return_inverse=True, return_counts=True)
    # how many of its class come before each sample: taking by turns is taking the lowest of these
    by_class = np.argsort(inverse, kind="stable")
    turn = np.empty(len(order), dtype=np.int64)
    turn[by_class] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = order[np.argsort(turn, kind="stable")[:count]]
    return torch.from_numpy(np.sort(chosen))


def indices_left_for_training(site: Site, request: Stamp, indices: Tensor) -> Tensor:
    """indices (n,) of the task's new samples, or those of them that pre-training leaves for this round.

    Raises ConfigError when the site has fewer than pre-training asks of each site.
    """
    config = site.experiment.pretraining
    if config is None or request.task != 1:
        return indices
    config.require(site.name, len(indices))
    generator = stream(site.experiment.seed, "pretraining", site.name)
    chosen = balanced_choice(site.data.y[indices], config.samples, generator)
    if request.round <= config.rounds:
        return indices[chosen]
    if not config.exclude:
        return indices
    rest = torch.ones(len(indices), dtype=torch.bool)
    rest[chosen] = False
    return indices[rest]
