"""Rows of the head averaged by how many samples of their class each site has trained on.

A site that holds none of a class moves that class's row too, and under FedAvg it counts there by all of its
samples. Here row c of the head becomes theta_c + sum_k n_kc update_k[c] / sum_k n_kc, n_kc being the samples
of class c on which site k trained; all other tensors are the base strategy's. The rule is ours: weights by
label counts are FedDisco's idea (Ye et al. 2023, arXiv 2305.19229), taken row by row.

Symbols: K sites, M classes seen so far, n_kc samples of class c at site k.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from perennial.config.strategies import ASKS
from perennial.foundation.errors import ConfigError
from perennial.protocol.measurements import LABEL_COUNTS
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.round.context import Aggregator, Around, RoundContext
from perennial.strategies.round.gate import Admitted, Rejected
from perennial.strategies.round.label_counts import checked_counts
from perennial.strategies.round.request import Arrays, TaskStart
from perennial.strategies.round.traits import Traits
from perennial.strategies.sums.exact_sum import ExactSum
from perennial.strategies.wrapper import Wrapper

HEAD = ("head.weight", "head.bias")
"""(M, d) and (M,): the tensors with a row for each class."""


class ClassWeightedHead(Wrapper):
    """Wraps a strategy, and averages each row of the head by the sites' samples of its class.

    The row of a class that no site of the round trained on is the base's.

    base: what combines all other tensors. It must fold plain updates: a robust rule would lose its hold on
    the head, and sites with a correction of their own remember an update of which the head counts otherwise.

    Sites are asked how many samples of each class they train on, which no accountant covers: under privacy
    they refuse. A site's counts add up to no more than the samples it counts as. Order of arrival
    changes no bit.
    """

    asks = ASKS["class_weighted_head"]

    def __init__(self, base: IncrementalStrategy) -> None:
        super().__init__(base)
        traits = base.traits
        for refused, why in (
            (not traits.aggregates_in_parallel or traits.imputes_absent_sites, "has rounds of its own kind"),
            (not traits.runs_per_cluster, "chooses one of several models"),
            (not traits.accepts_scaled_updates, "has sites that remember the whole of their updates"),
            (traits.compares_updates, "compares whole updates, and what it leaves out would be in the head"),
        ):
            if refused:
                raise ValueError(
                    f"base: {type(base).__name__} {why}; allowed: a strategy that only combines replies, "
                    "such as fedavg, feddisco or multi_factor"
                )

    def adapted(self, base: Traits) -> Traits:
        return replace(base, requires="label counts from the sites")

    def check_layers(self, arrays: Arrays) -> None:
        """Raise ConfigError when no head travels, or its rows are not one for each class."""
        missing = [name for name in HEAD if name not in arrays]
        if missing:
            raise ConfigError(
                f"strategy class_weighted_head: {', '.join(missing)} is not among the shared tensors; "
                "allowed with models whose head travels"
            )
        super().check_layers(arrays)

    def begin_task(self, task: TaskStart) -> None:
        self.check_layers(task.reference)
        super().begin_task(task)

    def aggregator(self, ctx: RoundContext) -> Aggregator:
        return HeadByClass(ctx, self.base.aggregator(ctx))


class HeadByClass(Around):
    """The base's aggregator, and beside it a sum of the head's rows, weighted by samples of their class."""

    def __init__(self, ctx: RoundContext, base: Aggregator) -> None:
        super().__init__(ctx, base)
        self._reference = ctx.reference
        # float64, so that a row times its share of the largest count is not rounded before it is added
        like = {name: self._reference[name].double() for name in HEAD}
        self._rows = ExactSum(like, ctx.sum_grid(float(ctx.request.bounds.max_samples)))
        self._counts: dict[str, list[float]] = {}

    def add(self, reply: Admitted) -> None:
        """Add one reply. Raises Rejected, with nothing added, if counts are invalid or it is too large."""
        classes = len(self._reference[HEAD[0]])
        counts = class_samples(reply.metrics.get(LABEL_COUNTS), reply.num_examples, classes)
        largest = max(counts)
        if not self._rows.grid.holds(largest, reply.norm):
            raise Rejected(f"update: norm {reply.norm:.3g} does not fit the sum over the sites")
        # an update is in the sums of both or of none: the base's refusal comes before anything is added here
        super().add(reply)
        update = {name: reply.update[name].double() for name in HEAD}
        shares = torch.tensor(counts, dtype=torch.float64, device=update[HEAD[0]].device) / largest
        self._rows.add(by_row(update, shares), largest, reply.norm)
        self._counts[reply.site] = counts

    def result(self) -> dict[str, Tensor]:
        """The base's model with the head's rows replaced by the sums by class."""
        arrays = super().result()
        if not self._counts:
            return arrays
        # sums that are rounded once, so that their order does not matter
        totals = [math.fsum(row) for row in zip(*self._counts.values(), strict=True)]
        self.ctx.outcome.details["class_samples"] = [round(total) for total in totals]
        for name, row_sums in self._rows.value().items():
            reference = self._reference[name]
            found = torch.tensor(totals, dtype=torch.float64, device=reference.device)
            held = found > 0
            steps = by_row({name: row_sums.to(reference.device)}, (1 / found).where(held, 0.0))[name]
            moved = (reference.double() + steps).to(reference.dtype)
            arrays[name] = torch.where(held.view(-1, *[1] * (moved.dim() - 1)), moved, arrays[name])
        return arrays


def class_samples(reported: object, samples: int, classes: int) -> list[float]:
    """(M,) samples of each class with which a site counts; they add up to at most `samples`.

    reported: its label counts; a class that it withholds counts as checked_counts says. samples: the number
    with which it counts in the round, once bounded. Raises Rejected unless there is one count for each class.
    """
    counts = checked_counts(reported, samples)
    if len(counts) != classes:
        raise Rejected(f"label_counts: found {len(counts)} classes, allowed {classes}")
    total = sum(counts)
    return [count * min(1.0, samples / total) for count in counts]


def by_row(tensors: Mapping[str, Tensor], factors: Tensor) -> dict[str, Tensor]:
    """Multiply row c of each tensor (M, ...) by factors[c]."""
    return {name: t * factors.view(-1, *[1] * (t.dim() - 1)) for name, t in tensors.items()}
