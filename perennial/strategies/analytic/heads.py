"""Solves the head of sums, and chooses how far it is shrunk."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from perennial.config.strategies import GAMMAS, LAMBDAS, find_shrinkage
from perennial.foundation.errors import ConfigError, DataError
from perennial.learning.analytic.cross_site import Judge
from perennial.learning.analytic.noised import NoisedSums, solve_noised_gaussian
from perennial.learning.analytic.solve import (
    HeadName,
    LinearHead,
    Sums,
    choose_by_gcv,
    solve_gaussian,
    solve_ridge,
)
from perennial.strategies.analytic.statistics_round import StatisticsRound

Shrinkage = Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["validation", "gcv"]


@dataclass(frozen=True)
class HeadSettings:
    """The settings of a head in closed form.

    head, shrinkage, standardise: as Analytic has them.
    shrinkages: ascending.
    """

    head: HeadName
    shrinkage: float | str
    shrinkages: tuple[float, ...]
    standardise: bool
    given: float | str | None = None
    """The shrinkage that the experiment gives; None: the default."""
    tried: list[dict[str, Any]] = field(default_factory=list)
    """head auto: what the latest choice was between: of each head on each set of maps the best shrinkage,
    best first."""

    @classmethod
    def of(
        cls,
        head: HeadName,
        shrinkage: Shrinkage | None,
        shrinkages: tuple[float, ...] | None,
        standardise: bool,
    ) -> Self:
        """The settings with defaults filled in. Raises ValueError naming a key that does not fit the head."""
        if head == "gaussian" and shrinkage == "gcv":
            raise ValueError("shrinkage: gcv chooses for ridge alone; allowed a number or validation")
        if head == "gaussian" and isinstance(shrinkage, float) and shrinkage > 1:
            raise ValueError(f"shrinkage: found {shrinkage}, allowed up to 1 with head gaussian")
        if head == "auto" and (shrinkage is not None or shrinkages is not None):
            raise ValueError("shrinkage, shrinkages: head auto chooses them; leave them out")
        if shrinkages is not None and (not shrinkages or min(shrinkages) <= 0):
            raise ValueError(f"shrinkages: found {shrinkages}, allowed one number above 0 or more")
        tried = shrinkages or (GAMMAS if head == "gaussian" else LAMBDAS)
        chosen = find_shrinkage({"head": head, "shrinkage": shrinkage})
        return cls(head, chosen, tuple(sorted(tried)), standardise, shrinkage)

    def needs_asking_again(self, shrinkage: float | None) -> bool:
        """Whether samples of all sites choose or weigh the head, so that a withdrawal asks the others again.

        shrinkage: a given one, in place of what samples choose; None: none is given.
        """
        chosen = self.shrinkage == "validation" and shrinkage is None
        return chosen or self.head in ("balanced_ridge", "auto")

    def require_noisable(self, products: bool) -> None:
        """Raise ConfigError for a setting that the solver of noised sums does not allow.

        What sums with noise may release is no question of the solver: config/strategies.py.
        products: whether sums of products are released.
        """
        if self.head == "gaussian":
            if self.given is not None:
                raise ConfigError(
                    f"strategy.shrinkage: found {self.given} with head gaussian and privacy, where the size "
                    "of the noise decides; leave it out"
                )
            return
        if not products:
            raise ConfigError(
                "strategy.head: found 'ridge', which needs sums of products, and privacy.blocks begins with "
                "0; allowed: gaussian"
            )
        if isinstance(self.shrinkage, str) or self.standardise:
            raise ConfigError(
                "strategy.shrinkage, standardise: with privacy and head ridge allowed: a number, which the "
                "noise's own size exceeds where it must, and false"
            )

    def solve_with_noise(self, sums: NoisedSums) -> LinearHead:
        """Solve the head of noised sums."""
        if self.head == "gaussian":
            return solve_noised_gaussian(sums)
        return solve_ridge(sums.prepare_for_ridge(), float(self.shrinkage))

    def solved(self, sums: Sums, choice: float) -> LinearHead:
        """Solve the head of these sums. choice: as chosen() returns it."""
        if self.head == "gaussian":
            return solve_gaussian(sums, choice)
        return solve_ridge(sums, choice, self.standardise)

    def judge(self, choice: float | None) -> Judge:
        """The ridge head by which sites judge each other. choice: of the run's head; None: it has none."""
        return Judge() if self.head != "ridge" or self.standardise else Judge(None, choice)

    def choose_without_asking(self, sums: Sums) -> float:
        """The given shrinkage, or the one by gcv. Raises ConfigError if validation samples should choose."""
        if self.shrinkage == "validation":
            raise ConfigError(
                "strategy.shrinkage: found 'validation', which asks the sites; allowed a number"
            )
        if self.shrinkage == "gcv":
            return choose_by_gcv(sums, self.shrinkages, self.standardise)
        return float(self.shrinkage)

    def chosen(self, asking: StatisticsRound, sums: Sums) -> float:
        """The given shrinkage, or the best of several by gcv or by validation samples; of equals the largest.

        With head auto, the number of a candidate, which has a shrinkage of its own.
        Raises DataError if validation samples should choose and no site has any.
        """
        if self.shrinkage != "validation":
            return self.choose_without_asking(sums)
        heads = [self.solved(sums, shrinkage) for shrinkage in self.shrinkages]
        correct, total = asking.ask_right_answers(heads)
        if not int(total.sum()):
            raise DataError(
                "strategy.shrinkage: no site has validation samples of these classes; a number needs none"
            )
        judged = total > 0
        shares = correct[:, judged] / total[judged]
        values = shares.mean(dim=1).tolist()
        assert all(map(math.isfinite, values))
        return max(zip(values, self.shrinkages, strict=True))[1]
