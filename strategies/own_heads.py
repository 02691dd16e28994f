"""A head of its own for each site, between the sums of all sites and its own: G + kappa G_k, S + kappa S_k.

The maps are shared and nobody trains, so a site's own model is one more solution from sums that the server
has. The site's validation samples choose kappa, and the site keeps the result.
"""

from collections.abc import Mapping
from functools import reduce
from operator import add
from typing import Any

from flwr.serverapp import Grid
from torch import Tensor

from perennial.config.analytic import KAPPAS
from perennial.config.strategies import ASKS
from perennial.foundation.errors import ConfigError
from perennial.learning.analytic.solve import LinearHead, Sums
from perennial.strategies.analytic import Analytic
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.clusters.personal_models import OwnAccuracy, complete_personal_models
from perennial.strategies.round.exchange import Exchange
from perennial.strategies.round.outcome import RoundOutcome
from perennial.strategies.round.request import RoundRequest, TaskStart
from perennial.strategies.round.run_context import RunContext
from perennial.strategies.statistics.statistics_round import StatisticsRound
from perennial.strategies.valuation.solved import require_affordable
from perennial.strategies.wrapper import Wrapper


class OwnHeads(Wrapper):
    """Wraps a closed form; at the end of each task a site's own sums count 1 + kappa times in its own head.

    kappas: those that are tried, beside 0, which is the head of all and wins ties. The base's criterion says
    what validation counts are compared by.
    """

    asks = ASKS["own_heads"]

    def __init__(self, base: IncrementalStrategy, kappas: tuple[float, ...] = KAPPAS) -> None:
        super().__init__(base)
        closed_form = base.find(Analytic)
        if closed_form is None:
            raise ValueError(
                f"base: found {type(base).__name__}, which has no sums of features; allowed: analytic"
            )
        closed_form.require_solvable()
        self._base = closed_form
        if not kappas or min(kappas) <= 0:
            raise ValueError(f"kappas: found {kappas}, allowed one number above 0 or more")
        self.kappas = (0.0, *sorted(kappas))
        self._accuracy = OwnAccuracy()
        self._chosen: dict[str, dict[str, float]] = {}

    def attach(self, run: RunContext) -> None:
        """Raises ConfigError where no validation samples choose, or sums have noise or come at any time."""
        experiment = run.experiment
        for refused, found in (
            (experiment.data.validation_fraction == 0, "data.validation_fraction 0 leaves no samples for it"),
            (experiment.privacy.enabled, "under privacy its sums have noise, which kappa would count again"),
            (experiment.rounds.asynchronous, "rounds.asynchronous has no round in which all have answered"),
        ):
            if refused:
                raise ConfigError(f"strategy.kappas: a site's validation samples choose, and {found}")
        super().attach(run)

    def begin_task(self, task: TaskStart) -> None:
        """Raises ConfigError where the sites' heads would take more than an hour."""
        super().begin_task(task)
        players = self.run.experiment.data.sites or len(task.sites)
        require_affordable(players * len(self.kappas), self._base.width)

    def train_round(self, grid: Grid, request: RoundRequest) -> RoundOutcome:
        """The base's round; then, in a task's last one, each site's own head."""
        outcome = super().train_round(grid, request)
        task = request.stamp.task
        last = request.stamp.round == sum(self.run.schedule.rounds[:task])
        if last and outcome.arrays is not None and not outcome.skipped:
            self._serve(grid, request, outcome)
        return outcome

    def _serve(self, grid: Grid, request: RoundRequest, outcome: RoundOutcome) -> None:
        exchange, task = Exchange(), request.stamp.task
        asking = StatisticsRound(grid, exchange, request, outcome, self._base.features, self._base.form)
        heads = {site: self._heads_of(site, request) for site in request.sites if self._gave(site)}
        chosen: dict[str, tuple[float, LinearHead]] = {}
        for site, (correct, total) in asking.answers_of_each(heads).items():
            best = self._best(correct, total)
            chosen[site] = self.kappas[best], heads[site][best]
        models: dict[int, Mapping[str, Tensor]] = {}
        for place, (_, head) in enumerate(chosen.values()):
            tensors = self._base.maps.over_all_maps(head).tensors()
            models[place] = dict(request.arrays) | {
                name: tensor.to(request.arrays[name].device) for name, tensor in tensors.items()
            }
        accuracies = complete_personal_models(
            grid,
            exchange,
            request,
            models,
            {site: place for place, site in enumerate(chosen)},
            (),
            lambda site, reason: outcome.warnings.append(f"site {site}: own model: {reason}"),
        )
        self._chosen[str(task)] = {site: kappa for site, (kappa, _) in sorted(chosen.items())}
        outcome.details["personalised_accuracy"] = self._accuracy.add(accuracies, request.stamp.round, task)
        outcome.details["kappa"] = self._chosen[str(task)]
        outcome.bytes_up += exchange.bytes_up
        outcome.bytes_down += exchange.bytes_down

    def _gave(self, site: str) -> bool:
        return bool(self._base.kept_sums.contributions_of(site))

    def _heads_of(self, site: str, request: RoundRequest) -> list[LinearHead]:
        """The site's head for each kappa."""
        sums, known = self._base.kept_sums, range(request.stamp.num_classes)
        assert sums.total is not None
        whole = Sums.of(sums.total.over(known))
        given = (sums.kept(task, site).over(known) for task in sums.contributions_of(site))
        own = Sums.of(reduce(add, given))
        return [self._base.head_of(whole.with_more(own, kappa), request.stamp.task) for kappa in self.kappas]

    def _best(self, correct: Tensor, total: Tensor) -> int:
        """The place of the kappa that the counts prefer; of equals the smallest.

        correct: (K, C). total: (C,).
        """
        held = total > 0
        if not held.any():
            return 0
        if self._base.settings.criterion == "balanced":
            values = (correct[:, held].double() / total[held]).mean(dim=1)
        else:
            values = correct.sum(dim=1).double() / total.sum()
        return int((values == values.max()).nonzero()[0])

    # what stays

    def summary_blocks(self) -> dict[str, Any]:
        """The base's, each site's kappa by task, and how good the sites' own models are after each task."""
        blocks = super().summary_blocks() | {"own_heads": {"kappa": self._chosen}}
        if self._accuracy.reported:
            blocks["personalised_accuracy"] = dict(sorted(self._accuracy.by_site.items()))
        return blocks

    def state_dict(self) -> dict[str, Any]:
        own = {"by_site": self._accuracy.by_site, "by_round": self._accuracy.by_round}
        return super().state_dict() | {"kappa": self._chosen} | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._chosen = {task: dict(sites) for task, sites in state["kappa"].items()}
        self._accuracy.by_site = {site: list(row) for site, row in state["by_site"].items()}
        self._accuracy.by_round = list(state["by_round"])
