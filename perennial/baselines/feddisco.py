"""FedDisco: a site counts less the further its labels are from balanced.

Ye et al. 2023 (arXiv 2305.19229).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from perennial.config.strategies import ASKS
from perennial.protocol.measurements import LABEL_COUNTS
from perennial.protocol.messages import TrainRequest
from perennial.protocol.stamp import MAX_EXAMPLES
from perennial.strategies.fedavg import FedAvg
from perennial.strategies.round.context import Aggregator, RoundContext
from perennial.strategies.round.gate import Admitted, Rejected
from perennial.strategies.round.request import Traits
from perennial.strategies.sums.exact_sum import ExactSum
from perennial.strategies.sums.update_file import UpdateFile


def measure_discrepancies(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """(K,) KL divergences of K sites' label distributions from the uniform one, over their sum.

    Uniform is over the classes that any of the sites holds. Natural logarithm; the sum over the sites is the
    authors' code. counts: (K, M) samples of each class at each site, no row empty.
    """
    held = counts[:, counts.sum(axis=0) > 0].astype(np.float64)
    share = held / held.sum(axis=1, keepdims=True)
    uniform = np.full(share.shape[1], 1 / share.shape[1])
    ratios = np.where(share > 0, share / uniform, 1.0)
    divergence = (share * np.log(ratios)).sum(axis=1)
    return divergence / divergence.sum() if divergence.sum() > 0 else divergence


A, B = 0.5, 0.1
"""The authors' own, of their experiments."""


def compute_disco_weights(samples: Sequence[int], distances: NDArray[np.float64]) -> NDArray[np.float64]:
    """(K,) weights that sum to 1: max(0, n_k/n - A d_k + B), normalised; n_k/n where every term is 0."""
    shares = np.asarray(samples, dtype=np.float64) / sum(samples)
    raw = np.maximum(0.0, shares - A * distances + B)
    return raw / raw.sum() if raw.sum() > 0 else shares


class FedDisco(FedAvg):
    """theta + sum_k w_k update_k with disco_weights.

    Sites are asked how many samples of each class they train on, which no accountant covers: under privacy
    they refuse. Weights depend on who answers, so updates wait on the server's disk until the round is over.
    Where no site was asked (Flower's own convention) the weights are FedAvg's.
    """

    asks = ASKS["feddisco"]
    traits = Traits(requires="label counts from the sites")

    asked = False
    """Whether sites were asked for label counts."""

    def requests(self, request: TrainRequest, sites: Sequence[str]) -> dict[str, TrainRequest]:
        self.asked = True
        return super().requests(request, sites)

    def aggregator(self, ctx: RoundContext) -> Aggregator:
        return BalancedMean(ctx, self)


class BalancedMean(Aggregator):
    """Keeps a round's updates on disk, and averages them once it is known who answered and holds what."""

    def __init__(self, ctx: RoundContext, method: FedDisco) -> None:
        super().__init__(ctx)
        self._method, self._most = method, ctx.request.most_replies
        self._grid = ctx.sum_grid(self._most)
        self._waiting = UpdateFile(ctx.reference)
        self._replies: dict[str, Admitted] = {}
        self._counts: dict[str, list[int]] = {}

    def add(self, reply: Admitted) -> None:
        reported = reply.metrics.get(LABEL_COUNTS)
        classes = self.ctx.request.stamp.num_classes
        counts = check_counts(reported, reply.num_examples, classes) if self._method.asked else []
        if not self._grid.holds(self._most, reply.norm):
            raise Rejected(f"update: norm {reply.norm:.3g} does not fit the sum over the sites")
        if self._method.asked:
            self._counts[reply.site] = counts
        self._waiting.add(reply.site, reply.update)
        self._replies[reply.site] = replace(reply, update={})

    def result(self) -> dict[str, Tensor]:
        sites = sorted(self._replies)
        weights = dict(zip(sites, self._compute_weights(sites).tolist(), strict=True))
        # weights that sum to the number of sites, so that the grid's step is small beside them for any number
        total = ExactSum(self.ctx.reference, self._grid)
        for site, update in self._waiting:
            total.add(update, weights[site] * len(sites), self._replies[site].norm)
        self.ctx.outcome.details["weights"] = weights
        return total.add_to(self.ctx.reference, len(sites))

    def _compute_weights(self, sites: Sequence[str]) -> NDArray[np.float64]:
        samples = [self._replies[site].num_examples for site in sites]
        if not self._counts:
            return np.array(samples, dtype=np.float64) / sum(samples)
        counts = np.array([self._counts[site] for site in sites], dtype=np.int64)
        return compute_disco_weights(samples, measure_discrepancies(counts))


def check_counts(value: Any, samples: int, classes: int) -> list[int]:
    """Check a site's label counts, and spread withheld samples evenly over the classes that it withholds.

    samples: number on which it trained. classes: number of those seen so far. Returns a count for each class.
    Raises Rejected for anything but whole numbers and null, one for each class and not all of them 0.
    """
    numbers = isinstance(value, list) and all(
        count is None or (type(count) is int and 0 <= count <= MAX_EXAMPLES) for count in value
    )
    if not numbers or not any(count is None or count for count in value):
        raise Rejected(f"label_counts: found {value!r:.60}, allowed whole numbers from 0, one above 0")
    # beside a class that does not exist, every honest site would look less balanced than it is
    if len(value) != classes:
        raise Rejected(f"label_counts: found {len(value)} numbers, allowed {classes}, one for each class")
    withheld = sum(count is None for count in value)
    if not withheld:
        return value
    # at least one sample each, so that a row is never empty
    rest = max(withheld, samples - sum(count or 0 for count in value))
    return [rest // withheld if count is None else count for count in value]
