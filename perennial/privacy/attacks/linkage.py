"""Links models to their sites although hidden neurons were permuted between hand-overs.

A permutation of hidden neurons keeps the function and changes every index, so that models cannot be compared
weight by weight. Weight matching undoes it: it is obfuscation, not protection.

Ainsworth et al. 2023 (arXiv 2209.04836), algorithm 1.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Layers = Sequence[Tensor]
"""Weights of a chain of layers, input to output, (out, in, ...) each; `in` of one is `out` of the one before,
or a multiple of it where a convolution's map was flattened channel by channel."""

MOST_SWEEPS = 20


def match_neurons(reference: Layers, permuted: Layers) -> list[Tensor]:
    """For each hidden layer the order of permuted's neurons that fits reference: permuted[order] ~ reference.

    Returns len(reference) - 1 index tensors. Each sweep solves one assignment for each layer, given the
    layers beside it, and stops when none changes.
    Raises ValueError when the shapes of the two models differ.
    """
    from scipy.optimize import linear_sum_assignment

    if [tuple(weight.shape) for weight in reference] != [tuple(weight.shape) for weight in permuted]:
        raise ValueError("the two models have layers of different shapes, so their neurons cannot be matched")
    orders = [torch.arange(len(weight)) for weight in reference[:-1]]
    for _ in range(MOST_SWEEPS):
        changed = False
        for layer, order in enumerate(orders):
            incoming = permuted[layer] if layer == 0 else reorder_inputs(permuted[layer], orders[layer - 1])
            outgoing = permuted[layer + 1]
            if layer + 1 < len(orders):
                outgoing = outgoing[orders[layer + 1]]
            gain = _rows(reference[layer]) @ _rows(incoming).T
            gain += _columns(reference[layer + 1], len(order)) @ _columns(outgoing, len(order)).T
            _, best = linear_sum_assignment(gain.cpu().numpy(), maximize=True)
            found = torch.from_numpy(np.asarray(best))
            changed |= not torch.equal(found, order)
            orders[layer] = found
        if not changed:
            break
    return orders


def align(reference: Layers, permuted: Layers) -> list[Tensor]:
    """permuted with its hidden neurons in reference's order."""
    orders = match_neurons(reference, permuted)
    aligned = []
    for layer, weight in enumerate(permuted):
        rows = weight[orders[layer]] if layer < len(orders) else weight
        aligned.append(rows if layer == 0 else reorder_inputs(rows, orders[layer - 1]))
    return aligned


def link_models(before: Sequence[Layers], after: Sequence[Layers], *, matching: bool = True) -> Tensor:
    """For each model of `after` the index of the one in `before` that it came from: (len(after),) int64.

    The pairing maximises the sum of cosine similarities. matching: align neurons first; without it the
    comparison is index by index, which a permutation defeats.
    """
    from scipy.optimize import linear_sum_assignment

    similarity = torch.stack(
        [torch.stack([_cosine(old, align(old, new) if matching else new) for old in before]) for new in after]
    )
    rows, columns = linear_sum_assignment(similarity.cpu().numpy(), maximize=True)
    linked = torch.full((len(after),), -1)
    linked[torch.from_numpy(np.asarray(rows))] = torch.from_numpy(np.asarray(columns))
    return linked


def reorder_inputs(weight: Tensor, order: Tensor) -> Tensor:
    """weight (out, in, ...) with its inputs reordered; the block of a flattened channel moves as one."""
    return weight.reshape(len(weight), len(order), -1)[:, order].reshape(weight.shape)


def _rows(weight: Tensor) -> Tensor:
    return weight.reshape(len(weight), -1)


def _columns(weight: Tensor, neurons: int) -> Tensor:
    """(neurons, rest): what each neuron of the layer before feeds."""
    return weight.reshape(len(weight), neurons, -1).transpose(0, 1).reshape(neurons, -1)


def _cosine(first: Layers, second: Layers) -> Tensor:
    one, two = (torch.cat([weight.reshape(-1) for weight in layers]) for layers in (first, second))
    return torch.nn.functional.cosine_similarity(one, two, dim=0)
