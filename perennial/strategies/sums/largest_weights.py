"""Keeps the updates that may turn out to have the largest weights, before the weights are known."""

from collections.abc import Mapping

from torch import Tensor

Factors = tuple[float | None, ...]


class LargestWeights:
    """The updates that can be among the `count` with the largest weights, whatever replies are still to come.

    A weight grows with each factor, so a site that is below `count` others in every factor is out for good.
    What is kept grows with a power of the logarithm of the number of sites for unrelated factors, and is
    `count` for one factor.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept: dict[str, tuple[Factors, Mapping[str, Tensor]]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def update(self, site: str) -> Mapping[str, Tensor]:
        return self._kept[site][1]

    def offer(self, site: str, factors: Factors, update: Mapping[str, Tensor]) -> None:
        """Note one site's factors, and keep its update while it may be among the largest.

        factors: of equal length for all sites; None, which only the whole round can value, compares with
        nothing else.
        """
        if self._above(factors) >= self._count:
            return
        self._kept[site] = factors, update
        outdone = [
            name
            for name, (own, _) in self._kept.items()
            if name != site and _below(own, factors) and self._above(own) > self._count
        ]
        for name in outdone:
            del self._kept[name]

    def _above(self, factors: Factors) -> int:
        return sum(_below(factors, others) for others, _ in self._kept.values())


def _below(factors: Factors, others: Factors) -> bool:
    """Whether no factor is above the other's; a site is below itself."""
    return all(
        own == other if own is None or other is None else own <= other
        for own, other in zip(factors, others, strict=True)
    )
