"""The noise that a trusted server adds to updates, and what one noised update costs in each mode.

One site's contribution is bounded by the L2 norm over all its float parameters together: clipping tensor by
tensor would multiply the sensitivity by the square root of their number."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from perennial.foundation.errors import PrivacyError
from perennial.privacy.config import Mode
from perennial.privacy.noise import Noise, add_noise
from perennial.privacy.shared_noise_cost import LEAST_STD, MOST_SITES, compute_shared_multiplier

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


def protect_update(vector: Tensor, clip_norm: float, std: float, source: Noise) -> float:
    """Clip and noise a whole update in place, at the site, as client_local does; returns its norm before.

    vector: (P,) float, all float parameters of the update; nothing else may leave with it. Each coordinate
    gets N(0, std^2); 0 clips only. The bound is on the L2 norm, so two updates of one site differ by up to
    2 * clip_norm. An update with NaN or infinity counts as zero, and gets its noise as any other. Raises
    PrivacyError on a clip norm that is not positive, or a negative std; the vector is then not to be sent.

    McMahan et al. 2018 (arXiv 1710.06963) with the noise at the site.
    """
    if not std >= 0:
        raise PrivacyError(f"the noise's standard deviation is {std}; allowed: 0 or more")
    norm = clip(vector, clip_norm)
    add_noise(vector, std, source)
    return norm


def compute_central_noise_std(clip_norm: float, noise_multiplier: float, largest_weight: float) -> float:
    """Standard deviation of the noise on sum_k w_k clip(update_k): the mechanism of client_central.

    largest_weight: the largest weight that the strategy may give to one site, whatever the sites report; not
    the mean and not 1 / number of sites. One site then moves the sum by at most largest_weight * clip_norm,
    as long as the weights are fixed in public or normalised by a public constant: were they normalised over
    those who answered, one site would also move the weights of the others.
    Raises PrivacyError when a bound is not positive.
    """
    if not largest_weight > 0 or not clip_norm > 0:
        raise PrivacyError(
            f"clip norm is {clip_norm} and largest weight {largest_weight}; both must be above 0, "
            "for the noise is sized by their product"
        )
    return noise_multiplier * clip_norm * largest_weight


def compute_effective_multiplier(mode: Mode, noise_multiplier: float) -> float:
    """Noise standard deviation over sensitivity, which is what an accountant takes.

    client_local hides the replacement of one site's whole data: two clipped updates lie up to 2 * clip_norm
    apart, so the multiplier counts half, without amplification (the server sees who takes part).
    client_central and sample
    hide one addition or removal: the multiplier counts in full. client_shared and sample_shared hide the
    same; what their discrete noise costs beyond a Gaussian is counted (privacy/shared_noise.py).
    Raises PrivacyError for mode none, which has no guarantee to account.
    """
    if mode == "none":
        raise PrivacyError("mode none protects nothing, so there is no multiplier to account")
    if mode in ("client_shared", "sample_shared"):
        # no scale below 4 steps is chosen, and no federation is larger than this
        return compute_shared_multiplier(noise_multiplier, LEAST_STD, MOST_SITES)
    return noise_multiplier / 2 if mode == "client_local" else noise_multiplier
