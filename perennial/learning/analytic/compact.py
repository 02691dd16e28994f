"""Sends exact sums in fewer bytes: as a triangular factor, or as compressed integers.

A site's matrix of products, G, has the rank of its samples. Where these are few, an upper trapezoid R with
R^T R = G has fewer values than a triangle of G. R is computed from the integers of G, by Cholesky's method
with pivoting, and from nothing else: so it tells nothing about the rows, or their order, beyond G.

The receiver multiplies and rounds to the grid. The sender has checked before, entry by entry, that this
gives the integers of G in whatever order the receiver's library adds (Higham, Accuracy and Stability of
Numerical Algorithms, 2002, section 3.1); where it might not, it sends G itself. Products with the constant
are left out, as they follow from the sums of the classes.

Shapes: D width of the features with the constant, r rank of G without the constant.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perennial.foundation.errors import ProtocolError
from perennial.learning.analytic.statistics import PRODUCT, Statistics, SumsForm, unpack_triangle
from perennial.models.feature_maps.projection import CONSTANT_STEPS

ROUNDING = 2.0**-53
EXACT_STEPS = 1 << 53
"""Steps up to which an integer is itself in double precision."""
PLANES = 8
"""Bytes of an integer of G."""


def compact_statistics(found: Statistics) -> dict[str, Tensor]:
    """Return the tensors of exact sums in the form that takes the fewest bytes.

    Args:
        found: sums with the constant, without noise.

    Returns:
        `sums` (C, D) and `counts` (C,), int64, and one of: `factor` (r (D - 1) - r (r - 1) / 2,) float64 with
        `order` (D - 1,) int32; `planes` (bytes,) uint8; `gram` (D (D + 1) / 2,) int64.
    """
    rest = {"sums": found.sums, "counts": found.counts}
    plain = found.gram.numel() * PLANES
    width, rank = found.width - 1, min(found.samples, found.width - 1)
    if 2 * _count_trapezoid(rank, width) * 8 < plain and (factor := _factorise(found, rank)) is not None:
        return {**factor, **rest}
    planes = found.gram.contiguous().numpy().astype("<i8", copy=False).view(np.uint8)
    pressed = zlib.compress(planes.reshape(-1, PLANES).T.tobytes(), 1)
    if len(pressed) < plain:
        return {"planes": torch.from_numpy(np.frombuffer(pressed, np.uint8).copy()), **rest}
    return {"gram": found.gram, **rest}


def read_compact(tensors: Mapping[str, Tensor], form: SumsForm, classes: range) -> dict[str, Tensor]:
    """Return `gram`, `sums` and `counts` of tensors that compact_statistics made; others as they are.

    Raises:
        ProtocolError: the tensors are of no matrix of this form.
    """
    kept = {name: tensor for name, tensor in tensors.items() if name not in ("factor", "order", "planes")}
    if "factor" in tensors or "order" in tensors:
        shapes = form.list_shapes(len(classes))
        if {name: tuple(tensor.shape) for name, tensor in kept.items()} != {
            name: shapes[name] for name in ("sums", "counts")
        } or kept["sums"].dtype != torch.int64:
            raise _make_refusal(f"{', '.join(sorted(tensors))}, of shapes that do not fit")
        return {"gram": _multiply_factor(tensors, form.width, kept["sums"].cpu()), **kept}
    if "planes" in tensors:
        return {"gram": _inflate(tensors["planes"], form.list_shapes(len(classes))["gram"][0]), **kept}
    return kept


def _count_trapezoid(rank: int, width: int) -> int:
    return rank * width - rank * (rank - 1) // 2


def _factorise(found: Statistics, rank: int) -> dict[str, Tensor] | None:
    """Return `factor` and `order`, or None where their product might not round to the integers of G."""
    from scipy.linalg import get_lapack_funcs

    if not found.gram.numel() or int(found.gram.abs().max()) >= EXACT_STEPS:
        return None
    gram = unpack_triangle(found.gram, found.width)
    if not torch.equal(found.gram[_last_column(found.width)], _compute_constant_products(found.sums)):
        return None
    gram = gram[:-1, :-1].numpy()
    pivoted_cholesky: Any = get_lapack_funcs("pstrf", dtype="float64")
    upper, order, found_rank, _ = pivoted_cholesky(gram)
    order = order - 1
    if found_rank > rank:
        return None
    upper = np.triu(upper[:found_rank])
    # the product of magnitudes bounds the error of any order of additions, at the sender and at the receiver
    slack = 2 * found_rank * ROUNDING / (1 - found_rank * ROUNDING)
    missed = np.abs(upper.T @ upper - gram[np.ix_(order, order)])
    missed += slack * (1 + slack) * (np.abs(upper).T @ np.abs(upper))
    if not float(missed.max(initial=0.0)) * PRODUCT < 0.49:
        return None
    values = np.concatenate([upper[row, row:] for row in range(found_rank)] or [np.empty(0)])
    return {"factor": torch.from_numpy(values), "order": torch.from_numpy(order.astype(np.int32))}


def _multiply_factor(tensors: Mapping[str, Tensor], width: int, sums: Tensor) -> Tensor:
    """Return the (D (D + 1) / 2,) int64 triangle of R^T R, with the products with the constant."""
    if not {"factor", "order"} <= tensors.keys():
        raise _make_refusal("`factor` or `order` alone")
    values, order = tensors["factor"].cpu(), tensors["order"].cpu()
    inner = width - 1
    if order.dtype != torch.int32 or not torch.equal(
        order.sort().values, torch.arange(inner, dtype=torch.int32)
    ):
        raise _make_refusal(f"an order that is none of {inner} features")
    rank = _rank_of(values.numel(), inner)
    if values.dtype != torch.float64 or values.dim() != 1 or rank is None:
        raise _make_refusal(f"a factor of {values.numel()} values of {values.dtype}, which is no trapezoid")
    upper = torch.zeros(rank, inner, dtype=torch.float64)
    start = 0
    for row in range(rank):
        end = start + inner - row
        upper[row, row:] = values[start:end]
        start = end
    product = (upper.T @ upper * PRODUCT).round_()
    if not bool((product.abs() < EXACT_STEPS).all()):
        raise _make_refusal("products of 2^53 steps or more")
    places = torch.empty(inner, dtype=torch.int64)
    places[order.long()] = torch.arange(inner)
    product = product[places][:, places]
    constant = _compute_constant_products(sums)
    triangle = torch.empty(width * (width + 1) // 2, dtype=torch.int64)
    start = 0
    for row in range(width):
        end = start + width - row
        triangle[start : end - 1] = product[row, row:] if row < inner else torch.empty(0)
        triangle[end - 1] = constant[row]
        start = end
    return triangle


def _rank_of(values: int, width: int) -> int | None:
    """Return the r of a trapezoid of so many values, None where there is none."""
    left, rank = values, 0
    while left > 0 and rank < width:
        left -= width - rank
        rank += 1
    return rank if left == 0 else None


def _inflate(planes: Tensor, entries: int) -> Tensor:
    if planes.dtype != torch.uint8 or planes.dim() != 1:
        raise _make_refusal(f"planes of {planes.dtype}, allowed a row of bytes")
    size = entries * PLANES
    stream = zlib.decompressobj()
    try:
        # never more than what was asked for, whatever the bytes would become
        found = stream.decompress(planes.cpu().contiguous().numpy().tobytes(), size + 1)
    except zlib.error as error:
        raise _make_refusal(f"planes that cannot be read ({error})") from error
    if len(found) != size or not stream.eof:
        raise _make_refusal(f"planes of another size than {size} bytes")
    return torch.from_numpy(np.frombuffer(found, np.uint8).reshape(PLANES, -1).T.copy().view("<i8")[:, 0])


def _compute_constant_products(sums: Tensor) -> Tensor:
    """Return the (D,) products of each feature, and of the constant, with the constant."""
    return sums.sum(dim=0) * CONSTANT_STEPS


def _last_column(width: int) -> Tensor:
    """Return the places of the last column in a triangle that is stored row by row."""
    return torch.arange(width, 0, -1).cumsum(0) - 1


def _make_refusal(what: str) -> ProtocolError:
    return ProtocolError(f"StatisticsReply: statistics: found {what}")
