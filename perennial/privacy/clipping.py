"""Bounds what one site can contribute: the L2 norm over all its float parameters together.

The sensitivity of a release is stated as one norm over the concatenation; clipping tensor by tensor would
multiply it by the square root of their number.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from perennial.foundation.errors import PrivacyError

# Rounding each scaled coordinate to float32 changes the norm by at most this share.
ROUNDING_MARGIN = 1 - 2.0**-23


def clip(vector: Tensor, clip_norm: float) -> float:
    """Scale vector in place so that its L2 norm is at most clip_norm; returns its norm before.

    vector: (P,) float, all float parameters of an update. A vector within the bound keeps its bits, so a zero
    vector stays zero. A longer one keeps its direction and ends at most 2**-22 (relative) below clip_norm,
    never above: the guarantee is stated for the rounded numbers that leave, not for the real ones. A vector
    with NaN or infinity becomes zero, and its norm is that: a model can be made so that training overflows
    because of one sample, and whether it did must not show. Raises PrivacyError when clip_norm is not finite
    and positive.
    """
    return clip_tensors([vector], clip_norm)


def clip_tensors(tensors: Iterable[Tensor], clip_norm: float) -> float:
    """Clip several tensors together in place, as clip() clips one vector; returns the norm before.

    tensors: any shapes, 0-d ones included. Integer and boolean tensors are neither measured nor changed: a
    step counter is no contribution of the data, and would otherwise use up the norm.
    """
    if not 0 < clip_norm < math.inf:
        raise PrivacyError(f"clip norm is {clip_norm}; allowed: a finite number above 0")
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    squares = [
        torch.linalg.vector_norm(tensor, dtype=torch.float64).square() for tensor in floats if tensor.numel()
    ]
    norm = math.sqrt(sum(square.item() for square in squares))
    if not math.isfinite(norm):
        for tensor in floats:
            tensor.zero_()
    elif norm > clip_norm:
        for tensor in floats:
            tensor.copy_(tensor.double().mul_(clip_norm / norm * ROUNDING_MARGIN))
    return norm
