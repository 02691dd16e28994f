"""Chooses a head among many of the same sums, by sites' validation samples.

Maps that stand side by side share one matrix of products, whose parts are the sums of each map alone. So one
exchange of sums and one of counts compare every map and all of them together, each under a Gaussian head, a
ridge head and a ridge head to which all classes are alike, at several shrinkages.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from perennial.config.strategies import DEFAULT_SHRINKAGE, MOST_CANDIDATES
from perennial.config.strategies import LAMBDAS as FINE_LAMBDAS
from perennial.foundation.errors import ConfigError, DataError
from perennial.learning.analytic.cross_site import Judge
from perennial.learning.analytic.solve import (
    LEAST_VARIANCE,
    NEVER,
    LinAlgError,
    LinearHead,
    Sums,
    compute_gcv,
    estimate_oracle_shrinkage,
    estimate_within_class,
    solve_gaussian,
    solve_ridge,
)
from perennial.learning.analytic.statistics import Statistics, SumsForm
from perennial.models.feature_maps.fixed import FixedFeatures, locate_maps
from perennial.strategies.analytic.heads import HeadSettings
from perennial.strategies.analytic.kept import KeptSums
from perennial.strategies.analytic.statistics_round import StatisticsRound

GAMMAS = (0.001, 0.01, 0.1, 0.3, 0.7)
LAMBDAS = (1e-5, 1e-3, 1e-2, 1e-1, 1.0)
KINDS = {"gaussian": GAMMAS, "ridge": LAMBDAS, "ridge, classes alike": LAMBDAS}
"""The shrinkages that are tried with each head."""
FROM_SUMS = 0.0
"""In place of a Gaussian head's shrinkage: the one that its sums give."""
OF_ROWS = {"gaussian": (FROM_SUMS,), "ridge": FINE_LAMBDAS, "ridge, classes alike": FINE_LAMBDAS}
MOST_MAPS = 3
SELDOM = 0.5
"""Share of the mean number of a class's records below which a class is rare, so that classes count alike."""
CLEARLY = 0.1
"""By so much the cross-validated error must fall with a wider map for the sums to speak for it."""
Z = 1.96


@dataclass(frozen=True)
class Candidate:
    """One head that is compared. maps: indices of those it sees. kind: one of KINDS."""

    maps: tuple[int, ...]
    kind: str
    shrinkage: float


@dataclass(frozen=True)
class AutomaticHead(HeadSettings):
    """The settings of `head: auto`. A choice is a candidate's number. widths, names: of the maps."""

    widths: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    rows: bool = False
    """Whether samples are rows of a table: then the sums alone shrink each head, and the candidate of
    choose_first() is taken unless another is clearly better."""

    fillers: frozenset[int] = frozenset()

    def over(
        self, widths: Sequence[int], names: Sequence[str], rows: bool = False, fillers: Sequence[int] = ()
    ) -> "AutomaticHead":
        """The settings for these maps. rows: of tables. fillers: features that no head of rows looks at.

        Raises ConfigError if they give too many heads.
        """
        found = replace(self, widths=tuple(widths), names=tuple(names), rows=rows, tried=[])
        found = replace(found, fillers=frozenset(fillers))
        if len(widths) > MOST_MAPS:
            raise ConfigError(
                f"model.features: found {len(widths)} maps, of which head auto would compare more than "
                f"{MOST_CANDIDATES} heads; allowed three maps or fewer"
            )
        return found

    @property
    def candidates(self) -> list[Candidate]:
        """Every head that is compared."""
        alone = [(place,) for place in range(len(self.widths))]
        sets = alone if len(alone) == 1 else [tuple(range(len(alone))), *alone]
        kinds = OF_ROWS if self.rows else KINDS
        return [Candidate(maps, kind, value) for maps in sets for kind in kinds for value in kinds[kind]]

    def solved(self, sums: Sums, choice: float) -> LinearHead:
        """Solve the chosen candidate; its weights on features that it does not see are 0."""
        candidate = self.candidates[int(choice)]
        places = self._select_places(sums, candidate.maps)
        solvers = {"gaussian": solve_gaussian, "ridge": _solve_ridge, "ridge, classes alike": _solve_alike}
        seen = sums.of_features(places)
        head = solvers[candidate.kind](seen, candidate.shrinkage or estimate_oracle_shrinkage(seen))
        weight = torch.zeros(len(head.bias), len(sums.gram) - 1, dtype=torch.float64)
        weight[:, places] = head.weight
        return LinearHead(weight, head.bias)

    def judge(self, choice: float | None) -> Judge:
        """The ridge head of the maps that the chosen candidate sees."""
        if choice is None or not self.widths:
            return Judge()
        # standardised, a column that is rare at the others outweighs all of them at a site that has it
        return Judge(locate_maps(self.widths, self.candidates[int(choice)].maps))

    def _select_places(self, sums: Sums, maps: tuple[int, ...]) -> Tensor:
        """Indices of these maps' features; of rows without fillers and what is the same in every record.

        The latter get no weight anyway, and half of a row's values are so where nothing is missing.
        """
        places = locate_maps(self.widths, maps)
        if not self.rows or not sums.total:
            return places
        places = torch.tensor([place for place in places.tolist() if place not in self.fillers])
        inside = places.to(sums.gram.device)
        mean = sums.gram[-1, inside] / (sums.constant * sums.total)
        varies = sums.gram.diagonal()[inside] / sums.total - mean.square() > LEAST_VARIANCE
        return places[varies.cpu()] if varies.any() else places

    def choose_first(self, sums: Sums) -> int:
        """The number of the head that the sums alone give: ridge on the first map, shrunk as gcv prefers.

        Raises DataError where the sums have no ridge solution.
        """
        return self._choose_by_gcv(sums, (0,))[1]

    def _choose_by_gcv(self, sums: Sums, maps: tuple[int, ...]) -> tuple[float, int]:
        """(cross-validated error, number) of the best ridge head on these maps."""
        seen = sums.of_features(self._select_places(sums, maps))
        errors = compute_gcv(seen, FINE_LAMBDAS, standardise=True)
        error, best = min(zip(errors, FINE_LAMBDAS, strict=True), key=lambda pair: (pair[0], -pair[1]))
        counts = sums.counts[sums.counts > 0]
        rare = float(counts.min()) < SELDOM * float(counts.mean())
        kind = "ridge, classes alike" if rare else "ridge"
        return error, self.candidates.index(Candidate(maps, kind, best))

    def _list_shrunk_by_sums(self, sums: Sums) -> tuple[list[int], dict[int, float]]:
        """(numbers of a table's heads to compare, cross-validated error of the ridge heads among them)."""
        numbers = [n for n, each in enumerate(self.candidates) if each.shrinkage == FROM_SUMS]
        errors = dict[int, float]()
        for maps in {each.maps: None for each in self.candidates}:
            with suppress(DataError):
                error, number = self._choose_by_gcv(sums, maps)
                errors[number] = error
        return sorted([*numbers, *errors]), errors

    def _of_rows(
        self,
        ranked: list[tuple[float, int]],
        values: dict[int, tuple[float, float]],
        errors: dict[int, float],
    ) -> list[tuple[float, int]]:
        """`ranked` with choose_first() in front, unless a head gains over one standard error of the gain.

        A few validation rows tell little of a wider map, of which the sums of all training rows tell much.
        Of wider maps only the ridge head with the least cross-validated error is looked at: it is taken if
        that error is clearly less than the first one's, unless the rows contradict, not if it is no less.
        """
        first = next((number for number in errors if self.candidates[number].maps == (0,)), None)
        if first is None:
            return ranked
        value, doubt = values[first]
        widest = min(errors, key=lambda number: errors[number])
        fall = 1 - errors[widest] / errors[first]

        def is_better(number: int) -> bool:
            # the same rows judge both, so that the gain varies less than that
            gain, about = values[number][0] - value, math.hypot(doubt, values[number][1])
            if number == widest:
                return gain > (-about if fall >= CLEARLY else about)
            return self.candidates[number].maps == (0,) and gain > about

        others = [number for number in (widest, *(own for _, own in ranked)) if number != first]
        front = next(filter(is_better, others), first)
        return sorted(ranked, key=lambda each: each[1] != front)

    def chosen(self, asking: StatisticsRound, sums: Sums) -> float:
        """The number of the candidate that validation samples prefer. Raises as rank_heads() does."""
        return float(self.rank_heads(asking, sums)[0][1])

    def rank_heads(self, asking: StatisticsRound, sums: Sums) -> list[tuple[float, int]]:
        """(value, number) of the best shrinkage of each head on each set of maps, best first; noted in tried.

        Each is judged with its neighbours in shrinkage, [1, 2, 1] / 4, because few samples choose among many.
        Of rows choose_first() stays in front unless another is better, as _of_rows() says.
        Where no site has validation samples nothing is chosen: (0, the default). Raises DataError if no site
        answers, or no head can be solved.
        """
        solved, heads = [], []
        numbers, errors = self._list_shrunk_by_sums(sums) if self.rows else (range(len(self.candidates)), {})
        for number in numbers:
            try:
                heads.append(self.solved(sums, number))
                solved.append(number)
            except (DataError, RuntimeError):
                continue
        if not heads:
            raise DataError("head auto: no head can be solved from these sums")
        correct, total = asking.ask_right_answers(heads)
        if not int(total.sum()):
            return [(0.0, self._choose_default(asking, solved, sums))]
        values = {n: self._judged(row, total) for n, row in zip(solved, correct.double(), strict=True)}
        curves: dict[tuple[tuple[int, ...], str], list[int]] = {}
        for number in solved:
            candidate = self.candidates[number]
            curves.setdefault((candidate.maps, candidate.kind), []).append(number)
        best: list[tuple[float, int]] = []
        for curve in curves.values():
            smooth = _smooth([values[number][0] for number in curve])
            best.append(max(zip(smooth, curve, strict=True)))
        ranked = sorted(best, key=lambda found: -found[0])
        if self.rows:
            ranked = self._of_rows(ranked, values, errors)
        self.tried[:] = [self._report_head(number, *values[number], sums) for _, number in ranked]
        return ranked

    def _choose_default(self, asking: StatisticsRound, solved: Sequence[int], sums: Sums) -> int:
        """Of rows choose_first(); else the Gaussian head on all maps, the default elsewhere, if solved."""
        usual = Candidate(tuple(range(len(self.widths))), "gaussian", float(DEFAULT_SHRINKAGE["gaussian"]))
        number = next((n for n in solved if self.candidates[n] == usual), solved[0])
        if self.rows and (first := self.choose_first(sums)) in solved:
            number = first
        taken = self.candidates[number]
        note = (
            "head auto: no site has validation samples of these classes, so nothing was compared; the head "
            f"is {taken.kind} with shrinkage {taken.shrinkage:g}"
        )
        # once, also where there are maps to choose among
        if note not in asking.outcome.warnings:
            asking.outcome.warnings.append(note)
        self.tried.clear()
        return number

    def _judged(self, correct: Tensor, total: Tensor) -> tuple[float, float]:
        """(mean share of right answers over classes, its standard error) of one head."""
        judged = total > 0
        # one sample more of either kind, so that a class of few is not taken for certain
        kept = (correct[judged] + 1) / (total[judged] + 2)
        error = float((kept * (1 - kept) / total[judged]).sum().sqrt() / int(judged.sum()))
        return float((correct[judged] / total[judged]).mean()), error

    def _report_head(self, number: int, value: float, error: float, sums: Sums) -> dict[str, Any]:
        candidate = self.candidates[number]
        seen, grid = sums.of_features(self._select_places(sums, candidate.maps)), KINDS[candidate.kind]
        shrinkage = candidate.shrinkage or round(estimate_oracle_shrinkage(seen), 4)
        if self.rows:
            grid = FINE_LAMBDAS
        return {
            "maps": [self.names[place] for place in candidate.maps],
            "head": candidate.kind,
            "shrinkage": shrinkage,
            "value": round(value, 4),
            "interval": [round(max(0.0, value - Z * error), 4), round(min(1.0, value + Z * error), 4)],
            "end_of_grid": shrinkage in (grid[0], grid[-1]),
        }


def _smooth(values: list[float]) -> list[float]:
    padded = [values[0], *values, values[-1]]
    return [(a + 2 * b + c) / 4 for a, b, c in zip(padded, padded[1:], padded[2:], strict=False)]


def _solve_ridge(sums: Sums, shrinkage: float) -> LinearHead:
    return solve_ridge(sums, shrinkage, standardise=True)


def _solve_alike(sums: Sums, shrinkage: float) -> LinearHead:
    """Ridge as if every class had as many samples, spread as all classes are on average.

    Sums of each class's products would say how each is spread; they are as many times larger as there are
    classes. Raises DataError when there are not more samples than classes.
    """
    means, covariance, held = estimate_within_class(sums)
    each = sums.total / len(means)
    rows = torch.cat([means, torch.full_like(means[:, :1], sums.constant)], dim=1)
    gram = each * rows.T @ rows
    gram[:-1, :-1] += sums.total * covariance
    own = torch.zeros_like(sums.sums)
    own[held] = each * rows
    counts = torch.where(held, torch.full_like(sums.counts, each), torch.zeros_like(sums.counts))
    head = solve_ridge(replace(sums, gram=gram, sums=own, counts=counts), shrinkage, standardise=True)
    return LinearHead(head.weight, torch.where(held.cpu(), head.bias, torch.full_like(head.bias, NEVER)))


@dataclass
class MapChoice:
    """The choice of a run. whole: every map; None before the first task. chosen: one map of each slot."""

    whole: FixedFeatures | None = None
    chosen: list[int] | None = None
    tried: list[dict[str, Any]] = field(default_factory=list)
    """Of each alternative its best head, the best alternative of each choice first."""

    @property
    def there(self) -> bool:
        """Whether the experiment has any choice among maps."""
        return self.whole is not None and bool(self.whole.alternatives)

    @property
    def seen(self) -> FixedFeatures:
        """The features that sums are of: of the chosen maps; before, of the widest of each choice."""
        assert self.whole is not None
        if not self.there:
            return self.whole
        widths = self.whole.widths
        return self.whole.select_maps(
            self.chosen or [max(slot, key=lambda place: widths[place]) for slot in self.whole.slots]
        )

    def choose_maps(self, asking: StatisticsRound, settings: HeadSettings, classes: range) -> bool:
        """Choose the maps unless they are chosen; returns whether they are now, else warnings say why not."""
        if self.there and self.chosen is None:
            assert isinstance(settings, AutomaticHead)
            try:
                self._choose(asking, settings, classes)
            except (DataError, LinAlgError) as error:
                asking.outcome.warnings.append(f"no head: {error}")
        return self.chosen is not None or not self.there

    def _choose(self, asking: StatisticsRound, settings: AutomaticHead, classes: range) -> None:
        """Ask for each alternative's sums of the first task, then how its heads answer; keep the best.

        Where no site has validation samples it is the first of each choice. Raises DataError where too few
        sites answer.
        """
        assert self.whole is not None
        found: dict[int, int] = {}
        self.tried = []
        for slot in self.whole.alternatives:
            rounds = {place: self._limit_to_map(asking, place) for place in slot}
            order = self._order_rounds(asking, rounds)
            sums = {place: _collect_sums(rounds[place], classes) for place in order}
            ranked: list[tuple[float, int]] = []
            rows: dict[int, list[dict[str, Any]]] = {}
            for place in slot:
                width, name = self.whole.widths[place], self.whole.facts[place]["map"]
                alone = self.whole.select_maps([place])
                own = settings.over([width], [name], alone.of_rows, alone.fillers)
                known = range(asking.request.stamp.num_classes)
                ranked.append((own.rank_heads(rounds[place], Sums.of(sums[place].over(known)))[0][0], place))
                rows[place] = own.tried[:1]
            ranked.sort(key=lambda each: -each[0])
            found |= dict.fromkeys(slot, ranked[0][1])
            self.tried += [row for _, place in ranked for row in rows[place]]
        self.chosen = [found.get(slot[0], slot[0]) for slot in self.whole.slots]

    def expand_head(self, head: LinearHead) -> LinearHead:
        """The same head over the features of every map, as the run's model has them; 0 for unchosen ones."""
        if not self.there:
            return head
        assert self.whole is not None and self.chosen is not None
        weight = torch.zeros(len(head.bias), self.whole.width, dtype=torch.float64)
        # all maps share the length that the chosen ones share in the sums
        longer = math.sqrt(len(self.whole.maps) / len(self.chosen))
        weight[:, self.whole.locate_selected(self.chosen)] = longer * head.weight
        return LinearHead(weight, head.bias)

    def state(self) -> dict[str, Any]:
        """JSON-able values, which load() restores."""
        return {"maps": {"chosen": self.chosen, "tried": self.tried}} if self.there else {}

    def load(self, state: dict[str, Any]) -> None:
        if "maps" in state:
            self.chosen, self.tried = state["maps"]["chosen"], list(state["maps"]["tried"])

    def _limit_to_map(self, asking: StatisticsRound, place: int) -> StatisticsRound:
        assert self.whole is not None
        alone = self.whole.select_maps([place])
        return replace(asking, features=alone.content, form=SumsForm(alone.width + 1))

    def _order_rounds(self, asking: StatisticsRound, rounds: dict[int, StatisticsRound]) -> Sequence[int]:
        """The alternatives, first the one whose masked sum sites were asked to open and did not."""
        pending = None if asking.masked is None else asking.masked.store.pending
        return sorted(
            rounds, key=lambda place: pending is None or rounds[place].hash_subject(1) != pending.model
        )


def _collect_sums(asking: StatisticsRound, classes: range) -> Statistics:
    """What the sites' sums of the first task add up to. Raises DataError where fewer answer than must."""
    kept = KeptSums()
    for sites, statistics in asking.of_sites([*asking.request.sites], 1, classes):
        kept.add(1, sites, statistics)
    found, quorum = len(kept.contributions.get(1, {})), asking.request.quorum
    if kept.total is None or found < quorum:
        raise DataError(f"maps are not chosen yet: {found} sites sent sums to compare them by, of {quorum}")
    return kept.total
