"""The contribution of each site's updates or sums, as Shapley values, with intervals.

Yan et al. 2025 (TriCon-SF, arXiv 2506.16723), equations 10 to 12. The paper leaves open what a coalition of a
serial method is worth; we offer three readings, and docs/methods/tricon_sf.md says what each one costs and
assumes. The worth of a model is the mean over the classes of its utility on each, from 0 to 1.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from flwr.serverapp import Grid

from perennial.config.strategies import ASKS
from perennial.foundation.errors import ConfigError
from perennial.foundation.streams import stream
from perennial.learning.scored import Scores, Utility, Worth, balanced
from perennial.protocol.tensors import Tensors
from perennial.strategies.analytic.method import Analytic
from perennial.strategies.base import IncrementalStrategy, Wrapper
from perennial.strategies.round.context import RoundOutcome, RunContext
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.request import Arrays, RoundRequest, TaskStart, Traits
from perennial.strategies.serial_ring.method import SerialRing, Weighing
from perennial.strategies.valuation.shapley import (
    Sampling,
    Value,
    over_judges,
    shares_by_site,
    sweep_marginals,
)
from perennial.strategies.valuation.site_utility import (
    NULL_UPDATE,
    NullUpdates,
    Rollback,
    SiteJudge,
    site_judge,
)
from perennial.strategies.valuation.solved import (
    JudgedBySites,
    Reconstructed,
    leave_one_out,
    require_affordable,
    require_closed_form,
)

clock: Callable[[], float] = time.monotonic
"""Seconds, in which the cost of a valuation is stated."""


class Contribution(Wrapper):
    """Wraps a strategy and measures the contribution of each site on held-out samples.

    The samples are the server's; with "online", and if the server has none, they are the sites'. With "solve"
    no samples are needed: a coalition's model is judged by the sums of the sites that are not in it. If the
    server has samples, a round after which the model is worth less than chance explains is rolled back
    (valuation/rollback.py). A site is flagged where every update was zero, and in a closed form where the
    cross-site table marks it; a flag excludes nobody.

    estimator: "online" takes each sweep of a ring as one permutation of the sites; "reconstruct" builds
    models from the sites' updates; "solve" solves for each coalition of a closed form (valuation/solved.py).
    With "solve" the server's samples judge, or the other sites' sums where it has none.
    utility: the worth of an answer: the probability of the true class, or 1 if it is right. None:
    probability, or accuracy if the sites measure or the model is a closed form.
    samples: number of held-out samples, as many of each class as of the others.
    every: value one of so many rounds, or with "online" sweeps, drawn in secret.
    """

    asks = ASKS["contribution"]

    def __init__(
        self,
        base: IncrementalStrategy,
        estimator: Literal["online", "reconstruct", "solve"] = "online",
        utility: Utility | None = None,
        samples: int = 200,
        every: int = 1,
    ) -> None:
        super().__init__(base)
        self.ring, self.closed_form = base.find(SerialRing), base.find(Analytic)
        if estimator == "solve" or self.closed_form is not None:
            require_closed_form(self.closed_form is not None, base, estimator, utility)
            if self.closed_form is not None:
                self.closed_form.require_solvable()
            utility = "accuracy"
        elif estimator != "reconstruct" and self.ring is None:
            raise ValueError(
                f"estimator: found {estimator!r} with base {type(base).__name__}; allowed with serial_ring, "
                "which trains one site after the other; other strategies take 'reconstruct'"
            )
        if estimator == "reconstruct" and self.ring is not None and self.ring.relabel != "none":
            raise ValueError(
                "estimator: found 'reconstruct' with base.relabel 'permute'; allowed with relabel 'none', "
                "because updates of differently named neurons cannot be added"
            )
        for name, found in {"samples": samples, "every": every}.items():
            if found < 1:
                raise ValueError(f"{name}: found {found}, allowed 1 and more")
        self.estimator, self.samples = estimator, samples
        self._asked_utility = utility
        self.utility: Utility = utility or "probability"
        self.sampling = Sampling(cheap=estimator == "solve")
        self.every = every
        self.held_out: Literal["server", "sites"] | None = None
        """With "solve": whose samples or sums judge; known when a run begins."""
        self._nulls = NullUpdates()
        self._rollback = Rollback()
        self._site_judge: SiteJudge | None = None
        self._rows: list[dict[str, float]] = []
        self._updates: dict[int, Reconstructed] = {}
        self._seconds = {"valuing": 0.0, "rounds": 0.0}
        self._leave_one_out: dict[str, float] = {}
        self._judges: list[str] = []
        """With "solve": the sites, in their order."""

    def adapted(self, base: Traits) -> Traits:
        needed = "held-out samples at the server or the sites, on which models are valued"
        return replace(base, aggregates_in_parallel=False, requires=needed)

    def attach(self, run: RunContext) -> None:
        """Begin a run. Raises ConfigError if nobody may measure models, or an exact game is too large."""
        if self.estimator == "solve":
            self.held_out = "sites" if run.judge is None else "server"
        elif run.judge is None:
            if self._asked_utility is None:
                self.utility = "accuracy"
            self._site_judge = site_judge(run, self.estimator, self.utility)
        super().attach(run)

    def begin_task(self, task: TaskStart) -> None:
        """Begin a task. Raises ConfigError if the coalitions of a closed form would take over an hour."""
        super().begin_task(task)
        if self.closed_form is not None and self.attached:
            players = self.run.experiment.data.sites or len(task.sites)
            require_affordable(self.sampling.coalitions(players) + players + 1, self.closed_form.width)

    def train_round(self, grid: Grid, request: RoundRequest) -> RoundOutcome:
        """Run the base's round, and value the sites' contributions to it."""
        start, valued, before = clock(), self._seconds["valuing"], {*self._nulls.flags}
        self._updates = {}
        self._least_norm = NULL_UPDATE * Tensors(request.arrays).norm
        request = replace(
            request,
            observers=(*request.observers, self._watch),
            max_update_norm=request.max_update_norm,
        )
        if self.ring is not None:
            self.ring.weighing = self._weighing(self.ring, grid, request)
        outcome = self.base.train_round(grid, request)
        self._count_measuring(outcome)
        if not outcome.skipped:
            valuing = clock()
            self._value_round(request, outcome)
            if self.closed_form is None:  # which says itself whom it marks
                outcome.warnings += self._nulls.newly_flagged(before)
                self._roll_back(request, outcome)
            self._seconds["valuing"] += clock() - valuing
        outcome.details["valuing_seconds"] = round(self._seconds["valuing"] - valued, 4)
        self._seconds["rounds"] += clock() - start
        return outcome

    def _weighing(self, ring: SerialRing, grid: Grid, request: RoundRequest) -> Weighing | None:
        """Which models of a ring are measured in this round; None where turns are not valued as they come."""
        if self.estimator != "online":
            return None
        before, segments = (request.stamp.round - 1) * ring.segments, ring.segments
        self._weighed = frozenset(s for s in range(1, segments + 1) if self._valued(before + s))
        return Weighing(
            lambda arrays: self._weigh(grid, request, arrays),
            self._weighed,
            first=self._site_judge is not None,
        )

    def _valued(self, number: int) -> bool:
        """Whether a sweep or round, numbered from 1, is valued: one of every `every`, drawn at random.

        No site can know which one, so none can behave well in the valued ones alone.
        """
        block, place = divmod(number - 1, self.every)
        drawn = stream(self.run.secret_seed, "valued-sweeps", block).integers(self.every)
        return place == int(drawn)

    # the worth of a model

    def worth_of(self, arrays: Arrays) -> Worth:
        """(M,) utility of a model on the server's held-out samples of each class."""
        return self._judged(arrays).by_class(self.utility)

    def _judged(self, arrays: Arrays) -> Scores:
        if self.run.judge is None:
            raise ConfigError("strategy contribution: the server has no held-out samples to value models on")
        return self.run.judge(arrays, self.samples)

    def _weigh(self, grid: Grid, request: RoundRequest, arrays: Arrays) -> Worth | None:
        start = clock()
        judge = self._site_judge
        worth = self.worth_of(arrays) if judge is None else judge(grid, request, arrays)
        self._seconds["valuing"] += clock() - start
        return worth

    def _count_measuring(self, outcome: RoundOutcome) -> None:
        """Add the bytes that the sites' measuring took, and a warning for each site that did not measure."""
        if self._site_judge is not None:
            outcome.bytes_down += self._site_judge.sent
            outcome.warnings += [f"site {site}: {why}" for site, why in self._site_judge.failed.items()]
            self._site_judge.sent, self._site_judge.failed = 0, {}

    def _watch(self, reply: Admitted, before: Arrays, sweep: int) -> dict[str, Any]:
        """Whether the update is null; "reconstruct" needs all updates of a round at once, and keeps them."""
        if self.estimator == "reconstruct":
            weight = self.weight(reply) if self.ring is None else None
            self._updates.setdefault(sweep, Reconstructed(before)).add(reply.site, reply.update, weight)
        null = reply.norm <= self._least_norm
        if self.ring is None:
            self._nulls.count(reply.site, null)
        # of a ring's turns it is kept with its hops, so that a stop inside a round loses none
        return {"null": null}

    def _flags(self) -> dict[str, str]:
        """site -> why it is flagged: as the cross-site table of a closed form says, or for null updates."""
        if self.closed_form is not None:
            rows = self.closed_form.cross_site.get("sites", {})
            return {site: row["marked"] for site, row in rows.items() if row["marked"]}
        return self._nulls.flags

    def _value_round(self, request: RoundRequest, outcome: RoundOutcome) -> None:
        turns = [turn for turn in outcome.details.get("turns", []) if turn["kind"] == "taken"]
        for turn in turns:
            self._nulls.count(turn["site"], turn["null"])
        if self.estimator == "online":
            self._rows += sweep_marginals(turns, outcome.details.get("worth"), self._weighed)
            for turn in turns:
                # the journal gets the mean over the classes
                if turn.get("worth") is not None:
                    turn["worth"] = balanced(turn["worth"])
            if outcome.details.get("worth") is not None:
                outcome.details["worth"] = balanced(outcome.details["worth"])
        elif self.closed_form is not None:
            if self._valued(request.stamp.round):
                self._value_sums(self.closed_form, request)
        elif self._valued(request.stamp.round):
            # of a round that went on after a stop, the sweeps whose updates are lost are left out
            turns_of = Counter(turn["sweep"] for turn in turns)
            games = [
                game
                for sweep, game in sorted(self._updates.items())
                if len(game.sites) == turns_of.get(sweep, len(game.sites))
            ]
            for number, game in enumerate(games):
                value = game.value(lambda arrays: balanced(self.worth_of(arrays)))
                phi = self._shapley(len(game.sites), value, request.stamp.round, number)
                self._rows.append(dict(zip(game.sites, phi.tolist(), strict=True)))
        self._updates = {}

    def _value_sums(self, closed_form: Analytic, request: RoundRequest) -> None:
        """Value the game of all tasks so far, which replaces the values of earlier rounds.

        Judged by sites, there is one game for each of them, and one row of values.
        """
        if self.held_out == "sites":
            judged = JudgedBySites(closed_form.kept_sums, request.stamp.num_classes)
            self._judges, values = judged.sites, judged.values()
        else:
            game = closed_form.game(request.stamp)
            device = next(iter(request.arrays.values())).device

            def worth(head: dict[str, torch.Tensor]) -> float:
                return balanced(self.worth_of({name: tensor.to(device) for name, tensor in head.items()}))

            self._judges, values = game.sites, [cache(game.value(worth))]
        players = len(self._judges)
        rows = [self._shapley(players, value, request.stamp.round) for value in values]
        self._rows = [dict(zip(self._judges, row.tolist(), strict=True)) for row in rows]
        alone = np.mean([leave_one_out(players, value) for value in values], axis=0)
        self._leave_one_out = dict(zip(self._judges, alone.tolist(), strict=True))

    def _shapley(self, players: int, value: Value, *ids: int) -> np.ndarray:
        generator = stream(self.run.experiment.seed, "shapley", *ids)
        return self.sampling.values(players, value, generator)

    # after a round

    def _shares(self) -> dict[str, tuple[float, float, float]]:
        """site -> (share, low, high) of the run so far."""
        return shares_by_site(self._rows)

    def _roll_back(self, request: RoundRequest, outcome: RoundOutcome) -> None:
        """Keep the model that the round began with where the new one is worth too little."""
        if self._site_judge is not None or outcome.arrays is None:
            return
        after, before = self._judged(outcome.arrays), self._judged(request.arrays)
        change, error = after.change(before, self.utility)
        if self._rollback.refuses(request.stamp.task, change, error):
            outcome.arrays = dict(request.arrays)
            outcome.details["rolled_back"] = True
            outcome.warnings.append(
                f"round {request.stamp.round} is rolled back: the model's {self.utility} on held-out samples "
                f"changed by {change:+.3f}, which earlier rounds and the samples' own error do not explain"
            )

    # what stays, and what is reported

    def summary_blocks(self) -> dict[str, Any]:
        """The blocks on contribution in summary.json.

        contribution: site -> share, low, high, flag, value, and, judged by sites, what _by_others says.
        valuation: how it was measured and what it cost.
        """
        totals: dict[str, float] = defaultdict(float)
        for row in self._rows:
            for site, value in row.items():
                totals[site] += value
        flags, by_sites = self._flags(), self.held_out == "sites"
        block = {
            site: {
                "share": share,
                "low": low if math.isfinite(low) else None,
                "high": high if math.isfinite(high) else None,
                "flag": flags.get(site),
                "value": totals[site],
                **(self._by_others(site) if by_sites else {}),
            }
            for site, (share, low, high) in self._shares().items()
        }
        spent = self._seconds
        valuation = {
            "estimator": self.estimator,
            "utility": "squared error" if self.held_out == "sites" else self.utility,
            "sweeps": len(self._rows),
            "gain": sum(totals.values()),
            **({"held_out": self.held_out} if self.held_out else {}),
            "rounds_rolled_back": self._rollback.rounds,
            **({"leave_one_out": self._leave_one_out} if self.estimator == "solve" else {}),
            "seconds": round(spent["valuing"], 3),
            "share_of_other_work": round(spent["valuing"] / max(spent["rounds"] - spent["valuing"], 1e-9), 4),
        }
        return super().summary_blocks() | {"contribution": block, "valuation": valuation}

    def _by_others(self, site: str) -> dict[str, Any]:
        """Judged by the others: what a site adds for one of them, the 95 % interval, and whom it costs."""
        found = {j: row[site] for j, row in zip(self._judges, self._rows, strict=True) if j != site}
        low, mean, high = over_judges(list(found.values()))
        costs = [judge for judge, value in found.items() if value < 0]
        return {"value": mean, "value_low": low, "value_high": high, "costs": costs}

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
                "leave_one_out": self._leave_one_out,
                "judges": self._judges,
                "held_out": self.held_out,
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
        self._leave_one_out = facts.get("leave_one_out", {})
        self._judges, self.held_out = facts["judges"], facts["held_out"]
        super().load_state_dict(state)
