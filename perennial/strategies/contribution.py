"""The contribution of each site's turns in a ring, as Shapley values, with intervals.

Yan et al. 2025 (TriCon-SF, arXiv 2506.16723), equations 10 to 12. The paper leaves open what a coalition of a
serial method is worth; here each sweep of the ring is one permutation of the sites, and a turn's value is the
model's gain over it (docs/methods/tricon_sf.md). The worth of a model is the mean over the classes of its
utility on each, from 0 to 1.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from flwr.serverapp import Grid

from perennial.config.strategies import ASKS
from perennial.foundation.errors import ConfigError
from perennial.foundation.streams import stream
from perennial.learning.scored import Scores, Utility, Worth, average_classes, subtract_worth
from perennial.protocol.tensors import Tensors
from perennial.strategies.base import IncrementalStrategy, Wrapper
from perennial.strategies.round.context import RoundOutcome, RunContext
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.request import Arrays, RoundRequest, Traits
from perennial.strategies.serial_ring.method import SerialRing, Weighing
from perennial.strategies.site_utility import (
    NULL_UPDATE,
    NullUpdates,
    Rollback,
    SiteJudge,
    build_site_judge,
)

clock: Callable[[], float] = time.monotonic
"""Seconds, in which the cost of a valuation is stated."""

SAMPLES = 200
"""Held-out samples that measure a model's worth, as many of each class as of the others."""


class Contribution(Wrapper):
    """Wraps a ring and measures the contribution of each site on held-out samples.

    The samples are the server's, and if it has none, the sites'. If the server has samples, a round after
    which the model is worth less than chance explains is rolled back (valuation/site_utility.py). A site is
    flagged where every update was zero; a flag excludes nobody.

    utility: the worth of an answer: the probability of the true class, or 1 if it is right. None:
    probability, or accuracy if the sites measure.
    every: value one of so many sweeps, drawn in secret.
    """

    asks = ASKS["contribution"]

    def __init__(
        self,
        base: IncrementalStrategy,
        utility: Utility | None = None,
        every: int = 1,
    ) -> None:
        super().__init__(base)
        ring = base.find(SerialRing)
        if ring is None:
            raise ValueError(
                f"base: found {type(base).__name__}; allowed: serial_ring, whose sites train one by one"
            )
        self.ring = ring
        if every < 1:
            raise ValueError(f"every: found {every}, allowed 1 and more")
        self._asked_utility = utility
        self.utility: Utility = utility or "probability"
        self.every = every
        self._nulls = NullUpdates()
        self._rollback = Rollback()
        self._site_judge: SiteJudge | None = None
        self._rows: list[dict[str, float]] = []
        self._seconds = {"valuing": 0.0, "rounds": 0.0}

    def adapted(self, base: Traits) -> Traits:
        needed = "held-out samples at the server or the sites, on which models are valued"
        return replace(base, aggregates_in_parallel=False, requires=needed)

    def attach(self, run: RunContext) -> None:
        """Begin a run. Raises ConfigError if nobody may measure models."""
        if run.judge is None:
            if self._asked_utility is None:
                self.utility = "accuracy"
            self._site_judge = build_site_judge(run, self.utility)
        super().attach(run)

    def train_round(self, grid: Grid, request: RoundRequest) -> RoundOutcome:
        """Run the base's round, and value the sites' contributions to it."""
        start, valued, before = clock(), self._seconds["valuing"], {*self._nulls.flags}
        self._least_norm = NULL_UPDATE * Tensors(request.arrays).norm
        request = replace(
            request,
            observers=(*request.observers, self._watch),
            max_update_norm=request.max_update_norm,
        )
        self.ring.weighing = self._plan_weighing(grid, request)
        outcome = self.base.train_round(grid, request)
        self._count_measuring(outcome)
        if not outcome.skipped:
            valuing = clock()
            self._value_round(outcome)
            outcome.warnings += self._nulls.describe_new_flags(before)
            self._roll_back(request, outcome)
            self._seconds["valuing"] += clock() - valuing
        outcome.details["valuing_seconds"] = round(self._seconds["valuing"] - valued, 4)
        self._seconds["rounds"] += clock() - start
        return outcome

    def _plan_weighing(self, grid: Grid, request: RoundRequest) -> Weighing:
        """Which models of the ring are measured in this round."""
        segments = self.ring.segments
        before = (request.stamp.round - 1) * segments
        self._weighed = frozenset(s for s in range(1, segments + 1) if self._is_valued(before + s))
        return Weighing(
            lambda arrays: self._weigh(grid, request, arrays),
            self._weighed,
            first=self._site_judge is not None,
        )

    def _is_valued(self, number: int) -> bool:
        """Whether a sweep, numbered from 1, is valued: one of every `every`, drawn at random.

        No site can know which one, so none can behave well in the valued ones alone.
        """
        block, place = divmod(number - 1, self.every)
        drawn = stream(self.run.secret_seed, "valued-sweeps", block).integers(self.every)
        return place == int(drawn)

    # the worth of a model

    def measure_worth(self, arrays: Arrays) -> Worth:
        """(M,) utility of a model on the server's held-out samples of each class."""
        return self._judged(arrays).by_class(self.utility)

    def _judged(self, arrays: Arrays) -> Scores:
        if self.run.judge is None:
            raise ConfigError("strategy contribution: the server has no held-out samples to value models on")
        return self.run.judge(arrays, SAMPLES)

    def _weigh(self, grid: Grid, request: RoundRequest, arrays: Arrays) -> Worth | None:
        start = clock()
        judge = self._site_judge
        worth = self.measure_worth(arrays) if judge is None else judge(grid, request, arrays)
        self._seconds["valuing"] += clock() - start
        return worth

    def _count_measuring(self, outcome: RoundOutcome) -> None:
        """Add the bytes that the sites' measuring took, and a warning for each site that did not measure."""
        if self._site_judge is not None:
            outcome.bytes_down += self._site_judge.sent
            outcome.warnings += [f"site {site}: {why}" for site, why in self._site_judge.failed.items()]
            self._site_judge.sent, self._site_judge.failed = 0, {}

    def _watch(self, reply: Admitted, before: Arrays, sweep: int) -> dict[str, Any]:
        """Whether the update is null; kept with the ring's hops, so that a stop in a round loses none."""
        return {"null": reply.norm <= self._least_norm}

    def _value_round(self, outcome: RoundOutcome) -> None:
        turns = [turn for turn in outcome.details.get("turns", []) if turn["kind"] == "taken"]
        for turn in turns:
            self._nulls.count(turn["site"], turn["null"])
        self._rows += compute_marginals(turns, outcome.details.get("worth"), self._weighed)
        for turn in turns:
            # the journal gets the mean over the classes
            if turn.get("worth") is not None:
                turn["worth"] = average_classes(turn["worth"])
        if outcome.details.get("worth") is not None:
            outcome.details["worth"] = average_classes(outcome.details["worth"])

    # after a round

    def _roll_back(self, request: RoundRequest, outcome: RoundOutcome) -> None:
        """Keep the model that the round began with where the new one is worth too little."""
        if self._site_judge is not None or outcome.arrays is None:
            return
        after, before = self._judged(outcome.arrays), self._judged(request.arrays)
        change, error = after.change(before, self.utility)
        if self._rollback.judge_change(request.stamp.task, change, error):
            outcome.arrays = dict(request.arrays)
            outcome.details["rolled_back"] = True
            outcome.warnings.append(
                f"round {request.stamp.round} is rolled back: the model's {self.utility} on held-out samples "
                f"changed by {change:+.3f}, which earlier rounds and the samples' own error do not explain"
            )

    # what stays, and what is reported

    def summary_blocks(self) -> dict[str, Any]:
        """The blocks on contribution in summary.json.

        contribution: site -> share, low, high, flag, value.
        valuation: how it was measured and what it cost.
        """
        totals: dict[str, float] = defaultdict(float)
        for row in self._rows:
            for site, value in row.items():
                totals[site] += value
        flags = self._nulls.flags
        block = {
            site: {
                "share": share,
                "low": low if math.isfinite(low) else None,
                "high": high if math.isfinite(high) else None,
                "flag": flags.get(site),
                "value": totals[site],
            }
            for site, (share, low, high) in compute_site_shares(self._rows).items()
        }
        spent = self._seconds
        valuation = {
            "utility": self.utility,
            "sweeps": len(self._rows),
            "gain": sum(totals.values()),
            "rounds_rolled_back": self._rollback.rounds,
            "seconds": round(spent["valuing"], 3),
            "share_of_other_work": round(spent["valuing"] / max(spent["rounds"] - spent["valuing"], 1e-9), 4),
        }
        return super().summary_blocks() | {"contribution": block, "valuation": valuation}

    def state_dict(self) -> dict[str, Any]:
        sites = sorted({site for row in self._rows for site in row})
        rows = [[row.get(site, float("nan")) for site in sites] for row in self._rows]
        own = {
            "contribution_rows": torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(sites)),
            "contribution": {
                "sites": sites,
                "null": self._nulls.counts,
                "rollback": asdict(self._rollback),
                "seconds": self._seconds,
            },
        }
        return own | super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        facts = state["contribution"]
        self._rows = [
            {site: value for site, value in zip(facts["sites"], row, strict=True) if not math.isnan(value)}
            for row in state["contribution_rows"].tolist()
        ]
        self._nulls = NullUpdates(facts["null"])
        self._rollback = Rollback(**facts["rollback"])
        self._seconds = facts["seconds"]
        super().load_state_dict(state)


LEAST_GAIN = 1e-3
"""What shares are of, in a run that gained less."""


def compute_shares(
    marginals: np.ndarray, confidence: float = 0.95
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(share, low, high), each (N,): each player's part of the whole gain, and one-sided bounds either way.

    The bounds cover at the number of sweeps that there are: Fieller's for a ratio of two means, with
    Student's quantile. If the gain itself is in doubt, and with one sweep, they are infinite.
    Fieller 1954, doi 10.1111/j.2517-6161.1954.tb00159.x.

    marginals: (S, N), a row for each sweep; their sum is the gain.
    """
    from scipy.special import stdtrit  # by use: a run without contribution values never needs it

    sweeps = len(marginals)
    gains = marginals.sum(axis=1)
    total = float(gains.sum())
    share = marginals.sum(axis=0) / max(total, LEAST_GAIN)
    low, high = np.full_like(share, -np.inf), np.full_like(share, np.inf)
    if sweeps < 2 or total <= 0:
        return share, low, high
    quantile = float(stdtrit(float(sweeps - 1), confidence)) ** 2
    mean, gain = marginals.mean(axis=0), total / sweeps
    centred, spread = marginals - mean, gains - gain
    factor = quantile / (sweeps - 1) / sweeps
    # the shares r for which |mean - r gain| is within its own uncertainty: a r^2 - 2 b r + c <= 0
    a = gain**2 - factor * (spread @ spread)
    b = mean * gain - factor * (centred.T @ spread)
    c = mean**2 - factor * (centred**2).sum(axis=0)
    if a > 0:
        root = np.sqrt(np.maximum(b**2 - a * c, 0.0))
        low, high = (b - root) / a, (b + root) / a
    return share, low, high


def compute_site_shares(rows: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float, float]]:
    """site -> (share, low, high) as compute_shares() gives them. rows: site -> marginal, one a sweep."""
    sites = sorted({site for row in rows for site in row})
    if not sites:
        return {}
    found = np.stack(
        compute_shares(np.array([[row.get(site, 0.0) for site in sites] for row in rows])), axis=1
    )
    return {site: (share, low, high) for site, (share, low, high) in zip(sites, found.tolist(), strict=True)}


def compute_marginals(
    turns: Sequence[dict[str, Any]], end: Worth | None, weighed: Container[int]
) -> list[dict[str, float]]:
    """For each measured sweep: site -> change of the model's worth by its turn, as a mean over classes.

    turns: of one round, in order, each with "site", "sweep" and "worth", that of the model before, if known.
    end: worth of the model after the last turn. weighed: sweeps to return. Turns without a known worth before
    and after them are left out.
    """
    worths = [*(turn.get("worth") for turn in turns), end]
    measured = [
        (turn, subtract_worth(after, before))
        for turn, before, after in zip(turns, worths, worths[1:], strict=False)
        if turn["sweep"] in weighed and before is not None and after is not None
    ]
    return [
        {turn["site"]: average_classes(change) for turn, change in sweep}
        for _, sweep in groupby(measured, key=lambda found: found[0]["sweep"])
    ]
