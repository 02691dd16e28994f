"""Bucketing: a robust rule over means of random buckets of sites.

Karimireddy et al. 2022 (arXiv 2006.09365).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from perennial.foundation.streams import stream
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.robust_rule import Pieces, RobustRule
from perennial.strategies.round.context import RoundContext
from perennial.strategies.round.nested_state import nested, part


class Bucketing(RobustRule):
    """The rule `base` over the means of buckets of `size` sites, which are dealt anew in each round.

    Means of buckets are more alike than single sites are, so a rule costs honest sites less where data
    differ; each dishonest site spoils one bucket. Refused for 2 f >= buckets, and for what base refuses of
    the buckets. Cost: that of base, whose rows are fewer.
    """

    def __init__(
        self,
        base: IncrementalStrategy,
        size: int = 2,
        dishonest: int = 1,
        max_update_norm: float | None = None,
    ) -> None:
        super().__init__(dishonest, max_update_norm or base.max_update_norm)
        rule = base.find(RobustRule)
        if rule is None or base.inner:
            raise ValueError(
                f"base: found {type(base).__name__}; allowed median, trimmed_mean, krum, geometric_median "
                "and centred_clipping"
            )
        if size < 1:
            raise ValueError(f"size: found {size}, allowed 1 and more")
        self.base, self.size = rule, size
        self.inner = (rule,)

    def least_replies(self) -> int:
        buckets = max(2 * self.dishonest + 1, self.base.least_replies())
        # the last bucket may be smaller
        return (buckets - 1) * self.size + 1

    def combined(self, ctx: RoundContext, pieces: Pieces) -> Iterator[tuple[str, int, Tensor]]:
        seed = self.run.secret_seed if self.attached else 0
        order = stream(seed, "bucketing", ctx.number).permutation(len(pieces)).tolist()
        buckets = [order[start : start + self.size] for start in range(0, len(order), self.size)]
        mixing = torch.zeros(len(buckets), len(order), dtype=torch.float64)
        for row, bucket in zip(mixing, buckets, strict=True):
            row[bucket] = 1.0 / len(bucket)
        ctx.outcome.details["buckets"] = [sorted(pieces.sites[index] for index in b) for b in buckets]
        yield from self.base.combined(ctx, pieces.mixed(mixing))

    def state_dict(self) -> dict[str, Any]:
        return nested("base", self.base.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base.load_state_dict(part("base", state))
