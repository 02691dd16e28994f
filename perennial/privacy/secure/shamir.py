"""Shamir's secret sharing: any `threshold` shares give the secret back, fewer say nothing about it.

Shamir 1979. The field is the integers modulo the smallest prime above 2^256, so that a secret of 32 bytes is
one element of it.
"""

import secrets
from collections.abc import Mapping, Sequence

from perennial.foundation.errors import ProtocolError

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33


def split(secret: bytes, points: Sequence[int], threshold: int) -> dict[int, bytes]:
    """A share of the secret, 33 bytes, for each point.

    secret: 32 bytes. points: distinct positive integers, one for each holder of a share. threshold: shares
    that give the secret back, 1 to len(points). Raises ValueError when they are outside these ranges.
    """
    if len(secret) != SECRET_BYTES or len(set(points)) < len(points) or min(points, default=0) < 1:
        raise ValueError("a secret of 32 bytes and distinct positive points are needed")
    if not 1 <= threshold <= len(points):
        raise ValueError(f"threshold: found {threshold}, allowed 1 to {len(points)}")
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    shares = {}
    for point in points:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * point + coefficient) % PRIME
        shares[point] = value.to_bytes(SHARE_BYTES, "big")
    return shares


def weights_at_zero(points: Sequence[int]) -> list[int]:
    """Lagrange weights, with which sum_i weight_i share_i is the secret.

    The weights depend on the points alone, so one call serves every secret that is shared among them.
    """
    weights = []
    for own in points:
        above, below = 1, 1
        for other in points:
            if other != own:
                above = above * other % PRIME
                below = below * (other - own) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return weights


def join(shares: Mapping[int, bytes], weights: Sequence[int] | None = None) -> bytes:
    """The secret of 32 bytes that these shares, by point, belong to; exactly the threshold of them suffices.

    weights: weights_at_zero of the points in the order of shares, when they are known already. Raises
    ProtocolError when the shares are no shares of one secret, as far as that shows.
    """
    weights = weights_at_zero(list(shares)) if weights is None else weights
    value = 0
    for weight, share in zip(weights, shares.values(), strict=True):
        element = int.from_bytes(share, "big")
        if len(share) != SHARE_BYTES or element >= PRIME:
            raise ProtocolError(f"share: found {len(share)} bytes, allowed 33 that are one field element")
        value = (value + weight * element) % PRIME
    if value >= 2**256:
        raise ProtocolError("shares: they do not belong to one secret of 32 bytes")
    return value.to_bytes(SECRET_BYTES, "big")
