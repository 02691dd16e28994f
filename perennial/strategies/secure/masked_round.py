"""A round of training of which the server sees the sum of the updates, and no update.

The gate cannot look at one update here: the site clips and checks its own range, and the
server checks the sum.
"""

import math
import time
from dataclasses import replace
from typing import Any

import torch
from flwr.serverapp import Grid

from perennial.config.rounds import MAX_SAMPLES
from perennial.config.secure_words import UpdateWords, count_update_words
from perennial.models.sum_grid import LARGEST_NORM
from perennial.privacy.secure.server_session import NotEnough
from perennial.protocol.fields import WireMessage
from perennial.protocol.messages import TrainRequest
from perennial.protocol.tensors import hash_tensors
from perennial.strategies.fedavg import FedAvg
from perennial.strategies.round.context import RoundOutcome
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.request import RoundRequest
from perennial.strategies.secure.masked_sums import MaskedSums
from perennial.strategies.secure.store import Opened


class MaskedRound:
    """Rounds of training in which the server sees only the sum of the updates.

    sums: of the run.
    """

    def __init__(self, sums: MaskedSums) -> None:
        self._sums = sums

    def train_round(
        self,
        strategy: FedAvg,
        grid: Grid,
        request: RoundRequest,
    ) -> RoundOutcome:
        """Run one round; it is skipped, with the reason among the warnings, when nothing was opened."""
        start = time.monotonic()
        ctx = strategy.build_context(grid, request)
        common, outcome = request.build_request(), ctx.outcome
        sums, exchange = self._sums, self._sums.exchange
        exchange.bytes_up = exchange.bytes_down = 0
        ctx.asked = len(request.sites)

        def build_requests(fields: dict[str, Any]) -> list[tuple[str, int, WireMessage]]:
            made: dict[str, TrainRequest] = {}
            for sites, previous in request.previous.group_fields(request.sites):
                made |= strategy.requests(replace(common, **previous, **fields), sites)
            return [(site, node, made[site]) for site, node in request.sites.items()]

        def note(site: str, reason: str) -> None:
            refused = reason.startswith(("policy:", "privacy:", "state:", "data:"))
            if not reason.startswith("no answer"):
                (outcome.refused if refused else outcome.dropped).append((site, reason))

        def read(opened: Opened) -> tuple[dict[str, torch.Tensor], int]:
            layout = UpdateWords(sums.experiment, len(opened.roster))
            total, weight = layout.decode(opened.words, request.arrays)
            self._check(total, weight, len(opened.survivors), ctx.max_update_norm, layout)
            return total, weight

        try:
            opened, (total, weight) = sums.sum(
                grid,
                request.stamp,
                "update",
                hash_tensors(common.arrays),
                request.sites,
                request.deadline,
                build_requests,
                note,
                count_update_words(request.arrays),
                read,
                least=request.quorum,
            )
        except NotEnough as missing:
            outcome.warnings.append(f"no sum was opened: {missing}")
        except ValueError as fault:
            outcome.warnings.append(f"the opened sum is not used: {fault}")
        else:
            ctx.asked = len(opened.roster)
            outcome.arrays = strategy.take_sum(ctx, total, weight)
            outcome.participants = {site: Admitted(site, {}, 0.0, 1) for site in opened.survivors}
            outcome.details["secure"] = {"attempt": opened.attempt, "sites": len(opened.survivors)}
        outcome.absent = outcome.list_silent_sites(request.sites)
        outcome.bytes_up, outcome.bytes_down = exchange.bytes_up, exchange.bytes_down
        outcome.asked, outcome.seconds = ctx.asked, time.monotonic() - start
        return outcome

    def _check(
        self,
        total: dict[str, torch.Tensor],
        weight: int,
        survivors: int,
        bound: float | None,
        layout: UpdateWords,
    ) -> None:
        """Raises ValueError when honest sites cannot have made this sum.

        Its weight must be one that they can have, and its mean within the strategy's bound.
        """
        most = survivors * layout.weight(MAX_SAMPLES)
        if not survivors <= weight <= most:
            raise ValueError(f"the sum of the weights is {weight}; allowed {survivors} to {most}")
        norm = math.sqrt(math.fsum(float(tensor.square().sum()) for tensor in total.values())) / weight
        if layout.noise is None:
            largest = LARGEST_NORM * (1 + 1e-6)
            bound = largest if bound is None else min(bound, largest)
            if norm > bound:
                raise ValueError(f"the mean update has norm {norm:.4g}, above {bound:.4g}")
