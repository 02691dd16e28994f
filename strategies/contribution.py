"""What each site's updates have added: Shapley values of any strategy, and sites that add nothing or harm.

Yan et al. 2025 (TriCon-SF, arXiv 2506.16723), equations 10 to 12. The paper leaves open what a coalition of a
serial method is worth; three readings are offered, and docs/methods/tricon_sf.md says what each one costs and
assumes.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from flwr.serverapp import Grid

from perennial.foundation.errors import ConfigError, PrivacyError
from perennial.foundation.streams import stream
from perennial.strategies.base import Arrays, IncrementalStrategy, RoundOutcome, RoundRequest
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.services import Services
from perennial.strategies.valuation.coalitions import Reconstructed, Replayed
from perennial.strategies.valuation.shapley import (
    MOST_EXACT,
    Value,
    drawn_permutations,
    exact,
    over_permutations,
    shares,
)
from perennial.strategies.valuation.site_utility import SiteJudge
from perennial.strategies.wrapper import Wrapper

clock: Callable[[], float] = time.monotonic
"""What the cost of a valuation is stated in."""
NULL_UPDATE = 1e-8
"""Norm of an update as a share of the model's, below which a site has returned what it was sent."""


class Contribution(Wrapper):
    """Wraps a strategy and measures the contribution of each site on held-out samples.

    The samples are the server's; with "online", and if the server has none, they are the sites'.

    estimator: "online" takes a ring's sweeps as they happen for orders of joining; "reconstruct" puts models
    together from the sites' updates; "replay" lets the sites of a ring train again, in the order of their
    names.
    utility: what a model is worth.
    samples: on how many held-out samples.
    permutations: orders drawn at most; None: the larger of 30 and three times the sites.
    exact: all coalitions instead.
    every: one of so many rounds, or with "online" sweeps, is valued, drawn in secret.
    threshold: part of an equal share below which the whole interval of a flagged site lies, after
    least_sweeps.
    on_flag: "exclude" no longer asks flagged sites.
    """

    needs = "held-out samples at the server or the sites, on which models are valued"

    def __init__(
        self,
        base: IncrementalStrategy,
        estimator: Literal["online", "reconstruct", "replay"] = "online",
        utility: Literal["accuracy", "neg_loss"] = "accuracy",
        samples: int = 200,
        permutations: int | None = None,
        exact: bool = False,
        every: int = 1,
        threshold: float = 0.1,
        least_sweeps: int = 5,
        on_flag: Literal["report", "exclude"] = "report",
    ) -> None:
        super().__init__(base)
        self.combines_replies = False
        if estimator != "reconstruct" and base.turns is None:
            raise ValueError(
                f"estimator: found {estimator!r} with base {type(base).__name__}; allowed with serial_ring, "
                "which trains one site after the other; other strategies take 'reconstruct'"
            )
        if estimator == "reconstruct" and base.turns is not None and base.turns.renames_neurons:
            raise ValueError(
                "estimator: found 'reconstruct' with base.relabel 'permute'; allowed with relabel 'none', "
                "because updates of differently named neurons cannot be added"
            )
        if estimator == "online" and (exact or permutations is not None):
            raise ValueError("estimator 'online' takes the sweeps as they are: no exact or permutations")
        limits = {"samples": samples, "permutations": permutations or 1, "every": every}
        for name, found in (limits | {"least_sweeps": least_sweeps}).items():
            if found < 1 or permutations == 0:
                raise ValueError(f"{name}: found {found}, allowed 1 and more")
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold: found {threshold}, allowed 0 to 1")
        self.estimator, self.utility, self.samples = estimator, utility, samples
        self.permutations, self.exact, self.every = permutations, exact, every
        self.threshold, self.least_sweeps, self.on_flag = threshold, least_sweeps, on_flag
        self._services: Services | None = None
        self._site_judge: SiteJudge | None = None
        self._rows: list[dict[str, float]] = []
        self._updates: dict[int, Reconstructed] = {}
        self._null: dict[str, list[int]] = {}
        self._flags: dict[str, str] = {}
        self._excluded: list[str] = []
        self._seconds = {"valuing": 0.0, "rounds": 0.0}

    def attach(self, services: Services) -> None:
        """Raises ConfigError where nobody may measure models, or the game is too large to be exact."""
        if services.judge is None:
            self._site_judge = _site_judge(services, self.estimator, self.utility)
        sites = services.experiment.data.sites or 0
        if self.exact and sites > MOST_EXACT:
            raise ConfigError(f"strategy.exact: found {sites} sites, allowed at most {MOST_EXACT}")
        if self.estimator == "replay" and services.experiment.privacy.mode != "none":
            raise ConfigError(
                "strategy.estimator: found 'replay' under privacy; allowed online and reconstruct, because "
                "every repeated turn would be a release that no account covers"
            )
        self._services = services
        super().attach(services)
        self.watchers.append(self._watch)
        if self.turns is not None and self.estimator == "online":
            self.turns.weigh_by(self._weigh, first=self._site_judge is not None)

    def largest_weight(self) -> float:
        """Raises PrivacyError: what sites have contributed is computed from exact models, and published."""
        raise PrivacyError(
            "strategy: contribution tells what models are worth before the server's noise; privacy.mode "
            "client_central goes with fedavg"
        )

    def train_round(self, grid: Grid, request: RoundRequest) -> RoundOutcome:
        """The base's round without excluded sites, then its valuation."""
        start, valued = clock(), self._seconds["valuing"]
        self._updates = {}
        self._least_norm = NULL_UPDATE * _norm(request.arrays)
        if self.turns is not None:
            before = (request.stamp.round - 1) * self.turns.segments
            sweeps = range(1, self.turns.segments + 1)
            self.turns.weighed = frozenset(s for s in sweeps if self._valued(before + s))
        sites = {site: node for site, node in request.sites.items() if site not in self._excluded}
        request = replace(request, sites=sites)
        self._round = grid, request
        outcome = super().train_round(grid, request)
        self._tell_measuring(outcome)
        if not outcome.skipped:
            valuing = clock()
            self._value_round(grid, request, outcome)
            self._flag(outcome, request.stamp.round)
            self._seconds["valuing"] += clock() - valuing
        if self._excluded:
            outcome.details["excluded"] = list(self._excluded)
        outcome.details["valuing_seconds"] = round(self._seconds["valuing"] - valued, 4)
        self._seconds["rounds"] += clock() - start
        return outcome

    def _valued(self, number: int) -> bool:
        """Whether a sweep or round is valued: one of every `every`, drawn at random.

        No site can know which one, so none can behave well in the valued ones alone.

        number: of the sweep or round, from 1.
        """
        assert self._services is not None
        block, place = divmod(number - 1, self.every)
        drawn = stream(self._services.secret_seed, "valued-sweeps", block).integers(self.every)
        return place == int(drawn)

    # what is worth what

    def utility_of(self, arrays: Arrays) -> float:
        """Accuracy, or minus the loss, on the held-out samples."""
        assert self._services is not None and self._services.judge is not None
        accuracy, loss = self._services.judge(arrays, self.samples)
        return accuracy if self.utility == "accuracy" else -loss

    def _weigh(self, arrays: Arrays) -> float | None:
        start = clock()
        judge = self._site_judge
        utility = self.utility_of(arrays) if judge is None else judge(*self._round, arrays)
        self._seconds["valuing"] += clock() - start
        return utility

    def _tell_measuring(self, outcome: RoundOutcome) -> None:
        """What the sites' measuring has sent, and who has not measured."""
        if self._site_judge is not None:
            outcome.bytes_down += self._site_judge.sent
            outcome.warnings += [f"site {site}: {why}" for site, why in self._site_judge.failed.items()]
            self._site_judge.sent, self._site_judge.failed = 0, {}

    def _watch(self, reply: Admitted, before: Arrays, sweep: int) -> dict[str, Any]:
        """Whether the update is null; "reconstruct" needs all updates of a round at once, and keeps them."""
        if self.estimator == "reconstruct":
            weight = self.weight(reply) if self.turns is None else None
            self._updates.setdefault(sweep, Reconstructed(before)).add(reply.site, reply.update, weight)
        null = reply.norm <= self._least_norm
        if self.turns is None:
            self._count_null(reply.site, null)
        return {"null": null}

    def _value_round(self, grid: Grid, request: RoundRequest, outcome: RoundOutcome) -> None:
        turns = [turn for turn in outcome.details.get("turns", []) if turn["kind"] == "taken"]
        for turn in turns:
            self._count_null(turn["site"], turn["null"])
        if self.estimator == "online":
            assert self.turns is not None
            self._rows += sweep_marginals(turns, outcome.details.get("worth"), self.turns.weighed)
        elif self._valued(request.stamp.round):
            games: list[Reconstructed | Replayed] = []
            if self.estimator == "replay":
                assert self.turns is not None
                games = [Replayed(self.turns, grid, request, outcome)]
            else:
                # of a round that went on after a stop, the sweeps whose updates are lost are left out
                turns_of = Counter(turn["sweep"] for turn in turns)
                games = [
                    game
                    for sweep, game in sorted(self._updates.items())
                    if len(game.sites) == turns_of.get(sweep, len(game.sites))
                ]
            for number, game in enumerate(games):
                phi = self._shapley(len(game.sites), game.value(self.utility_of), request.stamp.round, number)
                self._rows.append(dict(zip(game.sites, phi.tolist(), strict=True)))
        self._updates = {}

    def _shapley(self, players: int, value: Value, *ids: int) -> np.ndarray:
        if self.exact:
            return exact(players, value)
        assert self._services is not None
        count = self.permutations or max(30, 3 * players)
        orders = drawn_permutations(players, count, stream(self._services.experiment.seed, "shapley", *ids))
        return over_permutations(players, value, orders, truncation=1e-3, stop=0.05)

    # who is flagged

    def _count_null(self, site: str, null: bool) -> None:
        counts = self._null.setdefault(site, [0, 0])
        counts[0] += null
        counts[1] += 1

    def _shares(self) -> dict[str, tuple[float, float, float]]:
        """site -> (share, low, high) of the run so far."""
        sites = sorted({site for row in self._rows for site in row})
        if not sites:
            return {}
        assert self._services is not None
        marginals = np.array([[row.get(site, 0.0) for site in sites] for row in self._rows])
        generator = stream(self._services.experiment.seed, "bootstrap", len(self._rows))
        found = np.stack(shares(marginals, generator), axis=1).tolist()
        return {site: (share, low, high) for site, (share, low, high) in zip(sites, found, strict=True)}

    def _flag(self, outcome: RoundOutcome, number: int) -> None:
        if len(self._rows) < self.least_sweeps:
            return
        found = self._shares()
        flags = {site: self._flags[site] for site in self._excluded}
        for site, (_, _, high) in found.items():
            null, turns = self._null.get(site, [0, 0])
            if turns >= self.least_sweeps and null == turns:
                flags[site] = "null update"
            elif high < self.threshold / len(found):
                flags[site] = flags.get(site, "low share")
        for site in sorted(flags.keys() - self._flags.keys()):
            outcome.warnings.append(
                f"site {site}: contribution flagged ({flags[site]}; interval {found[site][1]:.1%} to "
                f"{found[site][2]:.1%} of the gain)"
            )
        self._flags = flags
        if self.on_flag == "exclude":
            self._excluded = sorted(flags)

    # what stays, and what is reported

    def summary_blocks(self) -> dict[str, Any]:
        """contribution: site -> share, low, high, flag. valuation: how it was measured and what it cost."""
        totals: dict[str, float] = defaultdict(float)
        for row in self._rows:
            for site, value in row.items():
                totals[site] += value
        block = {
            site: {
                "share": share,
                "low": low,
                "high": high,
                "flag": self._flags.get(site),
                "value": totals[site],
            }
            for site, (share, low, high) in self._shares().items()
        }
        spent = self._seconds
        valuation = {
            "estimator": self.estimator,
            "utility": self.utility,
            "sweeps": len(self._rows),
            "gain": sum(totals.values()),
            "excluded": self._excluded,
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
                "null": self._null,
                "flags": self._flags,
                "excluded": self._excluded,
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
        self._null, self._flags = facts["null"], facts["flags"]
        self._excluded, self._seconds = facts["excluded"], facts["seconds"]
        super().load_state_dict(state)


def sweep_marginals(
    turns: list[dict[str, Any]], end: float | None, weighed: Container[int]
) -> list[dict[str, float]]:
    """For each weighed sweep of one round: site -> what the model was worth after its turn minus before it.

    turns: in the order in which they happened, with "worth" of the model before, where it is known; end: of
    the model after the last of them. weighed: sweeps whose turns have a worth before and after them.
    """
    rows: dict[int, dict[str, float]] = {}
    worths = [*(turn.get("worth") for turn in turns), end]
    for turn, before, after in zip(turns, worths, worths[1:], strict=False):
        if turn["sweep"] in weighed and before is not None and after is not None:
            rows.setdefault(turn["sweep"], {})[turn["site"]] = after - before
    return list(rows.values())


def _norm(arrays: Arrays) -> float:
    return float(
        torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t) for t in arrays.values()]))
    )


def _site_judge(services: Services, estimator: str, utility: str) -> SiteJudge:
    """What measures where the server has no samples. Raises ConfigError where it cannot."""
    if services.experiment.evaluation.noise_multiplier is not None:
        raise ConfigError(
            "strategy: contribution found no held-out samples at the server, and would have every site count "
            "with noise after each turn; allowed with data.test_fraction above 0 and evaluation.central true"
        )
    if estimator != "online" or utility != "accuracy" or not services.experiment.evaluation.federated:
        raise ConfigError(
            f"strategy: contribution found no held-out samples at the server, estimator {estimator!r}, "
            f"utility {utility!r} and evaluation.federated "
            f"{str(services.experiment.evaluation.federated).lower()}; allowed with data.test_fraction "
            "above 0 and evaluation.central true, or, measured by the sites, with online, accuracy and true"
        )
    return SiteJudge()
