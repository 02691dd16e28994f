"""A sum of updates weighted by the softmax of their scores: one pass, any order of arrival, the same bits.

An online softmax keeps one running sum and rescales it whenever a larger score arrives; the rescaling rounds,
and the result then depends on the order. Here the weights exp(score) are cut into bands of a fixed ratio of
2^8 instead, each band has an exact sum of its own, and only the bands nearest the largest score stay. Which
bands stay at the end, and what is in them, depends on the scores alone. Bands are joined by powers of two,
which round nothing.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from perennial.models.sum_grid import SumGrid
from perennial.strategies.sums.exact_sum import ExactSum

BAND_BITS = 8
KEPT_BANDS = 5
"""A weight below 2^-32 of the largest counts as none: it could not change a float32 number."""
LARGEST = 2.0**BAND_BITS
"""Weight that an update may have inside its band at most."""


class SoftmaxSum:
    """sum_k softmax_k(score) update_k over the updates of a round, in the memory of at most KEPT_BANDS sums.

    Scores that differ by less than 5.5, the usual case, need one or two of them. like: name -> tensor; the
    shapes and device of every update to come; grid, for weights up to LARGEST, and
    model_size: as in ExactSum.
    """

    def __init__(self, like: Mapping[str, Tensor], grid: SumGrid, model_size: int = 0) -> None:
        self._like, self._grid, self._model_size = like, grid, model_size
        self._bands: dict[int, ExactSum] = {}
        self._band_of: dict[str, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._band_of)

    @property
    def nbytes(self) -> int:
        """Bytes of the accumulators that are held now."""
        return sum(band.nbytes for band in self._bands.values())

    def add(self, site: str, update: Mapping[str, Tensor], score: float, norm: float) -> None:
        """Add one site's update. score: of its softmax weight. norm: its L2 norm.

        Raises OverflowError when sums of such sizes do not fit; nothing is added then.
        """
        band, weight = _place(score)
        if band > self._top - KEPT_BANDS:
            if band not in self._bands:
                self._bands[band] = ExactSum(self._like, self._grid, self._model_size)
            self._bands[band].add({name: update[name] for name in self._like}, weight, norm)
            for low in [held for held in self._bands if held <= self._top - KEPT_BANDS]:
                del self._bands[low]
        self._band_of[site] = band, weight

    def weights(self) -> dict[str, float]:
        """site -> softmax weight, in the order of names; they add up to one."""
        relative = {
            site: math.ldexp(weight, BAND_BITS * (band - self._top)) if band in self._bands else 0.0
            for site, (band, weight) in sorted(self._band_of.items())
        }
        total = math.fsum(relative.values())
        return {site: weight / total for site, weight in relative.items()}

    def value(self) -> dict[str, Tensor]:
        """The weighted sum, float64, in the updates' shapes. Raises ValueError without any update."""
        if not self._band_of:
            raise ValueError("softmax over no site at all")
        bands = sorted(self._bands.items(), reverse=True)
        scales = [math.ldexp(1.0, BAND_BITS * (band - self._top)) for band, _ in bands]
        total = math.fsum(scale * band.weight for scale, (_, band) in zip(scales, bands, strict=True))
        result: dict[str, Tensor] = {}
        for scale, (_, band) in zip(scales, bands, strict=True):
            for name, tensor in band.value().items():
                result[name] = torch.add(result[name], tensor, alpha=scale) if name in result else tensor
        return {name: tensor.div_(total) for name, tensor in result.items()}

    @property
    def _top(self) -> int:
        return max(self._bands, default=-(2**62))


def _place(score: float) -> tuple[int, float]:
    """(band, weight inside it, from 1 to 2^8) of exp(score)."""
    bits = score * math.log2(math.e)
    band = math.floor(bits / BAND_BITS)
    return band, 2.0 ** (bits - BAND_BITS * band)
