"""Closed form on fixed features: sums of each task once, one solution, nothing forgotten.

AFL (arXiv 2405.16240), ACIL (Zhuang et al., NeurIPS 2022), RanPAC (arXiv 2307.02251), FeCAM (arXiv
2309.14062), Fed3R (Fani et al., ICML 2024). The sums are exact integers, so the head is the one of all data
in one place, whatever the number of sites, the skew, the order of tasks, absence or workers.
"""

import time
from dataclasses import replace
from typing import Any

from flwr.serverapp import Grid

from perennial.config import charges
from perennial.config.rounds import BoundsConfig
from perennial.config.strategies import ASKS
from perennial.data.schedule import TaskSchedule
from perennial.foundation.errors import ConfigError, DataError
from perennial.learning.analytic.solve import HeadName, LinAlgError, LinearHead, Sums
from perennial.learning.analytic.statistics import SumsForm, require_width
from perennial.models.feature_maps.fixed import FixedFeatures
from perennial.privacy.config import PrivacyConfig
from perennial.strategies.analytic import cross_site as judged
from perennial.strategies.analytic.automatic import AutomaticHead, MapChoice
from perennial.strategies.analytic.balanced import BalancedSums
from perennial.strategies.analytic.checks import attach_noise, choose_sums_form, compute_site_noise
from perennial.strategies.analytic.heads import HeadSettings, Shrinkage
from perennial.strategies.analytic.kept import FOLDER, KeptSums, combine_sums, require_own_sums, require_room
from perennial.strategies.analytic.statistics_round import StatisticsRound
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.round.context import RoundOutcome, RunContext
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.request import RoundRequest, TaskStart, Traits
from perennial.strategies.secure.masked_sums import MaskedSums


class Analytic(IncrementalStrategy):
    """One exchange a task: each site's sums of the task's classes, and of earlier ones that it was away for.

    head: gaussian (discriminants of one covariance), ridge, or balanced_ridge (each class counts alike);
    auto: what validation samples prefer of these, on each map alone and on all together.
    shrinkage: a number; "validation": what the sites' validation samples prefer, by one more exchange;
    "gcv": ridge's generalised cross-validation, from the sums alone; null: 0.1 for gaussian, gcv for ridge,
    validation for balanced_ridge. shrinkages: those to choose among. standardise: ridge on features
    of deviation 1. keep_sites: keep each site's sums in the run's folder, so that it can be withdrawn alone.
    """

    asks = ASKS["analytic"]
    traits = Traits(
        runs_per_cluster=False, aggregates_in_parallel=False, requires="sums of features from the sites"
    )

    def __init__(
        self,
        head: HeadName = "gaussian",
        shrinkage: Shrinkage | None = None,
        shrinkages: tuple[float, ...] | None = None,
        standardise: bool = True,
        keep_sites: bool = True,
    ) -> None:
        super().__init__()
        settings = HeadSettings if head != "auto" else AutomaticHead
        self.settings = settings.of(head, shrinkage, shrinkages, standardise)
        self.head = self.settings.head
        self.keep_sites = keep_sites
        self.bounds = BoundsConfig()
        """By which sites' sums are cut before the head is solved for: the experiment's."""
        self.features, self.form = "", SumsForm(0)
        """From the first task on: SHA-256 of the maps, and which sums sites send."""
        self._plain = KeptSums()
        self.maps = MapChoice()
        self._balanced = BalancedSums()
        self.cross_site: dict[str, Any] = {}
        self.chosen: dict[int, float] = {}  # task -> what settings.chosen() said of its head
        self._facts: list[dict[str, str]] = []
        self._parts: tuple[list[int], list[str]] = ([], [])
        self.withdrawn: dict[str, dict[str, Any]] = {}
        """Sites whose sums were taken back, and what was said of it; they are asked no more."""
        self.groups: dict[str, dict[str, Any]] = {}
        """The same of groups of a site's records, by the SHA-256 of the file that the site gave."""

    # the life of a run

    def attach(self, run: RunContext) -> None:
        """Begin a run. Raises ConfigError if it lacks validation samples that should choose the shrinkage."""
        experiment = run.experiment
        # a table's first head follows from the sums alone
        asks = self.settings.shrinkage == "validation" and (self.head, experiment.data.source) != (
            "auto",
            "csv",
        )
        if asks and experiment.data.validation_fraction == 0:
            raise ConfigError(
                f"strategy.shrinkage: {self.head} takes 'validation' here, and "
                "data.validation_fraction 0 leaves no samples for it; "
                "allowed a number" + ("" if self.head == "gaussian" else ", or gcv")
            )
        if experiment.privacy.enabled:
            self.settings.require_noisable(experiment.privacy.blocks[0] > 0)
        own = self.keep_sites and self.head != "balanced_ridge" and run.sums is None
        require_own_sums(experiment.bounds, own and not experiment.privacy.enabled)
        super().attach(run)
        self.bounds = experiment.bounds
        if self.keep_sites and run.folder is not None and run.sums is None:
            self._plain.folder = run.folder.parent / FOLDER

    def begin_task(self, task: TaskStart) -> None:
        """Begin a task. Raises ConfigError if features are not fixed, or too many to solve for."""
        backbone = self.run.load(task.reference).backbone
        if not isinstance(backbone, FixedFeatures):
            name = self.run.experiment.model.name
            raise ConfigError(
                f"model.name: found {name!r}; strategy analytic solves for a head on features that nobody "
                "trains; allowed: features"
            )
        experiment, schedule = self.run.experiment, self.run.schedule
        self.maps.whole = backbone
        self._look()
        require_width(self.width)
        kept = self.count_kept_bytes(self.maps.seen.width, schedule, experiment.privacy)
        require_room(kept * (experiment.data.sites or 1))

    def _look(self) -> None:
        """Through the maps that are chosen, or all where there is no choice."""
        seen = self.maps.seen
        self.form = choose_sums_form(seen.width, self.run.experiment.privacy)
        self.features, self._facts, self._parts = seen.content, seen.facts_of_seen, seen.parts
        if isinstance(self.settings, AutomaticHead):
            self.settings = self.settings.over(*seen.parts, seen.of_rows, seen.fillers)

    @property
    def width(self) -> int:
        """Number of features in a row of sums, with the constant if it is summed."""
        return self.form.width

    def count_kept_bytes(self, features: int, schedule: TaskSchedule, privacy: PrivacyConfig) -> int:
        """The most bytes that the run's folder will store of one site's sums, over all tasks."""
        if not self.keep_sites or self._masked is not None:
            return 0
        form = choose_sums_form(features, privacy)
        return sum(form.bytes(len(schedule.list_classes(t))) for t in range(1, schedule.count + 1))

    def train_round(self, grid: Grid, request: RoundRequest) -> RoundOutcome:
        """Ask the sites for missing sums, and solve the head from all sums."""
        start = time.monotonic()
        left = {site: node for site, node in request.sites.items() if site not in self.withdrawn}
        request = replace(request, sites=left)
        outcome = RoundOutcome(asked=len(left))
        self.exchange.bytes_up = self.exchange.bytes_down = 0
        noise = compute_site_noise(self.width, self.run.experiment)
        seen, task = (self.features, self.form), request.stamp.task
        signers = self._plain.add_signers(self.run.signers) if noise is None and not self._masked else None
        asking = StatisticsRound(grid, self.exchange, request, outcome, *seen, noise, self._masked, signers)
        ready = self.maps.choose_maps(asking, self.settings, self._list_classes(1))
        if self.maps.there:
            self._look()
            asking = replace(asking, features=self.features, form=self.form)
        for earlier in asking.order_tasks(range(task, 0, -1)) if ready else ():
            if self.head == "balanced_ridge":
                self._balanced.collect(asking, earlier, self._list_classes(earlier))
            else:
                self._collect(asking, earlier)
        for site in request.sites:
            if self.sums.has(task, site):
                samples = 1 if noise is not None or self._masked else max(1, self.sums.samples(site))
                outcome.participants[site] = Admitted(site, {}, 0.0, samples)
        if len(outcome.participants) >= request.quorum:
            try:
                head = self._solved(asking)
                tensors = self.maps.expand_head(head).list_tensors()
                outcome.arrays = {
                    name: tensor.to(request.arrays[name].device) for name, tensor in tensors.items()
                }
                outcome.warnings += self._compare_sites(task, range(request.stamp.num_classes))
                if self.cross_site:
                    outcome.details["cross_site"] = judged.summarise_block(self.cross_site)
            except (DataError, LinAlgError) as error:
                outcome.warnings.append(f"no head: {error}")
        outcome.absent = [s for s in request.sites if s not in {*outcome.participants, *asking.failed}]
        outcome.bytes_up, outcome.bytes_down = self.exchange.bytes_up, self.exchange.bytes_down
        outcome.seconds = time.monotonic() - start
        return outcome

    def _compare_sites(self, task: int, classes: range) -> list[str]:
        """Make the cross-site table of the sums as they are; returns sentences where it marks a site."""
        if judged.work(len(self.sums.sites), self.width) > judged.DEAR and task < self.run.schedule.count:
            return []
        before, able = judged.find_marked(self.cross_site), self._masked is None and not self._privacy.enabled
        self.compare_again(classes, able, self._plain.limit_to_task(task))
        return judged.describe_marked(self.cross_site) if judged.find_marked(self.cross_site) - before else []

    def compare_again(self, classes: range, able: bool = True, of: KeptSums | None = None) -> None:
        """Make the cross-site table anew, or an empty one if it cannot be made.

        able: whether the server has each site's own sums. of: sums to use in place of all.
        """
        judge = self.settings.judge(self.chosen[max(self.chosen)] if self.chosen else None)
        self.cross_site = judged.try_build_block(of or self._plain, classes, judge) if able else {}

    def summary_blocks(self) -> dict[str, Any]:
        """Blocks of summary.json: the sums, the feature maps, the shrinkage, and the cross-site table."""
        most = max(len(self._list_classes(task)) for task in range(1, self.run.schedule.count + 1))
        return ({"cross_site": self.cross_site} if self.cross_site else {}) | {
            "analytic": {
                "head": self.head,
                "maps": self._facts,
                "features": self.features,
                "width": self.width,
                **self.summarise_sums(),
                **({"samples": None} if self._privacy.enabled else {}),
                "message_bytes": self.form.bytes(most),
                "withdrawable": self.keep_sites and self._masked is None,
            },
            **({"map_choice": self.maps.tried} if self.maps.tried else {}),
            **({"head_choice": self.settings.tried} if self.settings.tried else {}),
        }

    def summarise_sums(self) -> dict[str, Any]:
        """What summary.json says of the present sums and their head."""
        total, in_part = self.sums.total, {record["site"] for record in self.groups.values()}
        gone = {
            "withdrawn": sorted(self.withdrawn),
            "withdrawn_in_part": sorted(in_part - self.withdrawn.keys()),
        }
        return {
            "samples": self.sums.number,
            "sums_sha256": None if total is None else total.sha256,
            "shrinkage": {str(task): value for task, value in sorted(self.chosen.items())},
            **(gone if any(gone.values()) else {}),
        }

    def state_dict(self) -> dict[str, Any]:
        state = self._plain.state("all") | self._balanced.state()
        state["cross_site"] = self.cross_site
        state["withdrawn"], state["groups"] = self.withdrawn, self.groups
        state |= self.maps.state()
        state["tried"] = self.settings.tried
        # a run that is resumed after its last task begins none
        state["seen"] = {"features": self.features, "facts": self._facts, "parts": list(self._parts)}
        state["chosen"] = {str(task): value for task, value in self.chosen.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._plain.load("all", state)
        self._balanced.load(state)
        self.maps.load(state)
        self.cross_site = dict(state.get("cross_site", {}))
        self.withdrawn, self.groups = dict(state["withdrawn"]), dict(state.get("groups", {}))
        self.chosen = {int(task): float(value) for task, value in state["chosen"].items()}
        self.settings.tried[:] = state.get("tried", ())
        if seen := state.get("seen"):
            self.features, self._facts = seen["features"], seen["facts"]
            self._parts = (seen["parts"][0], seen["parts"][1])

    # after the run: withdrawal and merging

    @property
    def kept_sums(self) -> KeptSums:
        """The sums of all sites, unweighted. Raises ConfigError with balanced_ridge, which weights them."""
        if self.head == "balanced_ridge":
            raise ConfigError(
                "strategy.head: balanced_ridge weighs every site's samples by the counts of all, so that "
                "nothing can be subtracted or merged; allowed: gaussian, ridge"
            )
        return self._plain

    def choose_again(self) -> None:
        """Forget all that samples chose or weighed, with the sums that depend on it."""
        self._balanced, self.cross_site, self.chosen = BalancedSums(), {}, {}
        self.settings.tried.clear()
        if self.maps.chosen is not None:
            self.maps.chosen, self.maps.tried = None, []
            self._plain = KeptSums(self._plain.folder, signers=self._plain.signers)

    def solve_again(
        self, classes: int, shrinkage: float | None = None, of: KeptSums | None = None
    ) -> tuple[LinearHead, float]:
        """Solve the head of the present sums without asking any site: (head, shrinkage).

        shrinkage: None takes the experiment's number, or chooses by gcv. of: sums to use, not all. Raises
        ConfigError if validation samples chose the shrinkage, some of which may be the withdrawn site's.
        """
        sums = combine_sums(of or self.kept_sums, self.bounds, range(classes))
        if self.settings.shrinkage == "validation" and (shrinkage is None or self.head == "auto"):
            raise ConfigError(
                "strategy.shrinkage: validation samples of all sites chose it, withdrawn ones too; allowed: "
                "head gaussian or ridge, and one that nobody's samples chose, by --shrinkage"
            )
        shrinkage = self.settings.choose_without_asking(sums) if shrinkage is None else shrinkage
        return self.settings.solved(sums, shrinkage), shrinkage

    # sums

    def _collect(self, asking: StatisticsRound, task: int) -> None:
        missing = [site for site in asking.request.sites if not self._plain.has(task, site)]
        if not missing:
            return
        if self._privacy.enabled:
            self._record(asking, missing, task)
        few = []
        for sites, statistics in asking.of_sites(missing, task, self._list_classes(task)):
            self._plain.add(task, sites, statistics, asking.statements.get((task, sites[0])))
            if 0 < statistics.samples < self.width and asking.noise is None:
                few.append(" with ".join(sites))
        if few:
            asking.outcome.warnings.append(
                f"task {task}: without noise, sums over fewer samples than the {self.width} features tell "
                f"the space that these lie in: {', '.join(sorted(few)[:5])}{', ...' if few[5:] else ''}"
            )

    def _record(self, asking: StatisticsRound, sites: list[str], task: int) -> None:
        """What sites are about to charge, on the disk before they are asked; sent again, it costs nothing."""
        stamp = asking.request.stamp
        entry = charges.price_sums(self.run.experiment, stamp.run, task).entry
        if self.run.releases is not None:
            self.run.releases.asked(stamp.round, sites, [entry], once=f"statistics {task}")

    @property
    def _masked(self) -> MaskedSums | None:
        return self.run.sums if self.attached else None

    @property
    def _privacy(self) -> PrivacyConfig:
        return self.run.experiment.privacy

    @property
    def sums(self) -> KeptSums | BalancedSums:
        """The sums that have been collected: class-balanced ones for balanced_ridge, else plain ones."""
        return self._balanced if self.head == "balanced_ridge" else self._plain

    def _list_classes(self, task: int) -> range:
        return self.run.schedule.list_classes(task)

    # solution

    def _solved(self, asking: StatisticsRound) -> LinearHead:
        task = asking.request.stamp.task
        plain = self._plain.limit_to_task(task)
        total = self._balanced.total if self.head == "balanced_ridge" else plain.total
        if total is None:
            raise DataError("no site has sent sums yet")
        known = range(asking.request.stamp.num_classes)
        asking.outcome.details = {"sums_sha256": total.sha256}
        if self._privacy.enabled:
            noised, warnings = attach_noise(total.over(known), self._plain.contributions, self.run)
            asking.outcome.warnings.extend(warnings)
            return self.settings.solve_with_noise(noised)
        if self.head == "balanced_ridge":
            sums = Sums.of(total.over(known), samples=self.sums.number)
        else:
            sums = combine_sums(plain, self.bounds, known)
        sums = sums.move_to(self.run.device)
        self.chosen[task] = choice = self.settings.chosen(asking, sums)
        asking.outcome.details["shrinkage"] = choice  # the name that files of earlier versions have
        if self.head == "auto":
            asking.outcome.details["tried"] = self.settings.tried
        return self.settings.solved(sums, choice)
