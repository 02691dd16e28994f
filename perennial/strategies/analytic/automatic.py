"""Chooses a head among many of the same sums, by sites' validation samples.

Maps that stand side by side share one matrix of products, whose parts are the sums of each map alone. So one
exchange of sums and one of counts compare every map and all of them together, each under a Gaussian head, a
ridge head and a ridge head to which all classes are alike, at several shrinkages.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from perennial.config.analytic import DEFAULT_SHRINKAGE, MOST_CANDIDATES
from perennial.foundation.errors import ConfigError, DataError
from perennial.learning.analytic.cross_site import Judge
from perennial.learning.analytic.solve import (
    NEVER,
    LinearHead,
    Sums,
    best_by_gcv,
    gaussian,
    ridge,
    within_class,
)
from perennial.models.feature_maps.fixed import places_of
from perennial.strategies.analytic.heads import HeadSettings
from perennial.strategies.analytic.statistics_round import StatisticsRound

GAMMAS = (0.001, 0.01, 0.1, 0.3, 0.7)
LAMBDAS = (1e-5, 1e-3, 1e-2, 1e-1, 1.0)
KINDS = {"gaussian": GAMMAS, "ridge": LAMBDAS, "ridge, classes alike": LAMBDAS}
"""The shrinkages that are tried with each head."""
Z = 1.96


@dataclass(frozen=True)
class Candidate:
    """One head that is compared. maps: indices of those it sees. kind: one of KINDS."""

    maps: tuple[int, ...]
    kind: str
    shrinkage: float


@dataclass(frozen=True)
class AutomaticHead(HeadSettings):
    """The settings of `head: auto`. A shrinkage is a candidate's number. widths, names: of the maps."""

    widths: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    rows: bool = False
    """Whether samples are rows of a table: then first() is taken unless another head is clearly better."""

    def over(self, widths: Sequence[int], names: Sequence[str], rows: bool = False) -> "AutomaticHead":
        """The settings for these maps. rows: of tables. Raises ConfigError if they give too many heads."""
        found = replace(self, widths=tuple(widths), names=tuple(names), rows=rows, tried=[])
        found = replace(found, shrinkages=tuple(map(float, range(len(found.candidates)))))
        if len(found.candidates) > MOST_CANDIDATES:
            raise ConfigError(
                f"model.features: found {len(widths)} maps, of which head auto would compare "
                f"{len(found.candidates)} heads; allowed {MOST_CANDIDATES}, so three maps or fewer"
            )
        return found

    @property
    def candidates(self) -> list[Candidate]:
        """Every head that is compared."""
        alone = [(place,) for place in range(len(self.widths))]
        sets = alone if len(alone) == 1 else [tuple(range(len(alone))), *alone]
        return [Candidate(maps, kind, value) for maps in sets for kind in KINDS for value in KINDS[kind]]

    def solved(self, sums: Sums, shrinkage: float) -> LinearHead:
        """Solve candidate number `shrinkage`; its weights on features that it does not see are 0."""
        candidate = self.candidates[int(shrinkage)]
        places = places_of(self.widths, candidate.maps)
        solve = {"gaussian": gaussian, "ridge": _ridge, "ridge, classes alike": _alike}[candidate.kind]
        head = solve(sums.of_features(places), candidate.shrinkage)
        weight = torch.zeros(len(head.bias), len(sums.gram) - 1, dtype=torch.float64)
        weight[:, places] = head.weight
        return LinearHead(weight, head.bias)

    def judge(self, shrinkage: float | None) -> Judge:
        """The ridge head of the maps that the chosen candidate sees."""
        if shrinkage is None or not self.widths:
            return Judge()
        # standardised, a column that is rare at the others outweighs all of them at a site that has it
        return Judge(places_of(self.widths, self.candidates[int(shrinkage)].maps))

    def first(self, sums: Sums) -> int:
        """The number of the head that the sums alone give: ridge on the first map, shrunk as gcv prefers.

        Where the criterion is the mean over classes, classes count alike in it. Raises DataError where the
        sums have no ridge solution.
        """
        kind = "ridge, classes alike" if self.criterion == "balanced" else "ridge"
        seen = sums.of_features(places_of(self.widths, (0,)))
        return self.candidates.index(Candidate((0,), kind, best_by_gcv(seen, LAMBDAS, standardise=True)))

    def chosen(self, asking: StatisticsRound, sums: Sums) -> float:
        """The number of the candidate that validation samples prefer. Raises as ranked() does."""
        return float(self.ranked(asking, sums)[0][1])

    def ranked(self, asking: StatisticsRound, sums: Sums) -> list[tuple[float, int]]:
        """(value, number) of the best shrinkage of each head on each set of maps, best first; noted in tried.

        Each is judged with its neighbours in shrinkage, [1, 2, 1] / 4, because few samples choose among many.
        Of rows first() stays in front unless another is better by more than one standard error.
        Where no site has validation samples nothing is chosen: (0, the default). Raises DataError if no site
        answers, or no head can be solved.
        """
        solved, heads = [], []
        for number in range(len(self.candidates)):
            try:
                heads.append(self.solved(sums, number))
                solved.append(number)
            except (DataError, RuntimeError):
                continue
        if not heads:
            raise DataError("head auto: no head can be solved from these sums")
        correct, total = asking.right_answers(heads)
        if not int(total.sum()):
            return [(0.0, self._default(asking, solved, sums))]
        values = {n: self._judged(row, total) for n, row in zip(solved, correct.double(), strict=True)}
        curves: dict[tuple[tuple[int, ...], str], list[int]] = {}
        for number in solved:
            candidate = self.candidates[number]
            curves.setdefault((candidate.maps, candidate.kind), []).append(number)
        best: list[tuple[float, int]] = []
        for curve in curves.values():
            smooth = _smoothed([values[number][0] for number in curve])
            best.append(max(zip(smooth, curve, strict=True)))
        ranked = sorted(best, key=lambda found: -found[0])
        if self.rows and (first := self.first(sums)) in values:
            (value, error), winner = values[first], ranked[0]
            # the same rows judge both heads, so their difference varies less than the sum of the two
            if winner[0] - value <= max(error, values[winner[1]][1]):
                own = next(curve for curve in curves.values() if first in curve)
                ranked = [(value, first), *(each for each in ranked if each[1] not in own)]
        self.tried[:] = [self._told(number, *values[number]) for _, number in ranked]
        return ranked

    def _default(self, asking: StatisticsRound, solved: Sequence[int], sums: Sums) -> int:
        """Of rows first(); else the Gaussian head on all maps that is the default elsewhere, if solved."""
        usual = Candidate(tuple(range(len(self.widths))), "gaussian", float(DEFAULT_SHRINKAGE["gaussian"]))
        number = next((n for n in solved if self.candidates[n] == usual), solved[0])
        if self.rows and (first := self.first(sums)) in solved:
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
        """(the criterion, its standard error) of one head on the validation samples."""
        judged = total > 0
        if self.criterion != "balanced":
            share = float(correct.sum() / total.sum())
            return share, math.sqrt(share * (1 - share) / float(total.sum()))
        # one sample more of either kind, so that a class of few is not taken for certain
        kept = (correct[judged] + 1) / (total[judged] + 2)
        error = float((kept * (1 - kept) / total[judged]).sum().sqrt() / int(judged.sum()))
        return float((correct[judged] / total[judged]).mean()), error

    def _told(self, number: int, value: float, error: float) -> dict[str, Any]:
        candidate = self.candidates[number]
        grid = KINDS[candidate.kind]
        return {
            "maps": [self.names[place] for place in candidate.maps],
            "head": candidate.kind,
            "shrinkage": candidate.shrinkage,
            "value": round(value, 4),
            "interval": [round(max(0.0, value - Z * error), 4), round(min(1.0, value + Z * error), 4)],
            "end_of_grid": candidate.shrinkage in (grid[0], grid[-1]),
        }


def _smoothed(values: list[float]) -> list[float]:
    padded = [values[0], *values, values[-1]]
    return [(a + 2 * b + c) / 4 for a, b, c in zip(padded, padded[1:], padded[2:], strict=False)]


def _ridge(sums: Sums, shrinkage: float) -> LinearHead:
    return ridge(sums, shrinkage, standardise=True)


def _alike(sums: Sums, shrinkage: float) -> LinearHead:
    """Ridge as if every class had as many samples, spread as all classes are on average.

    Sums of each class's products would say how each is spread; they are as many times larger as there are
    classes. Raises DataError when there are not more samples than classes.
    """
    means, covariance, held = within_class(sums)
    each = sums.total / len(means)
    rows = torch.cat([means, torch.full_like(means[:, :1], sums.constant)], dim=1)
    gram = each * rows.T @ rows
    gram[:-1, :-1] += sums.total * covariance
    own = torch.zeros_like(sums.sums)
    own[held] = each * rows
    counts = torch.where(held, torch.full_like(sums.counts, each), torch.zeros_like(sums.counts))
    head = ridge(replace(sums, gram=gram, sums=own, counts=counts), shrinkage, standardise=True)
    return LinearHead(head.weight, torch.where(held.cpu(), head.bias, torch.full_like(head.bias, NEVER)))
