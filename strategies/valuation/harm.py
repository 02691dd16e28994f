"""Which sites make the model worse at the classes that they train on.

A low contribution value is no accusation: where sites hold different classes, an honest site's turn makes
the model forget what others hold, and its value is negative. An honest site does make the model better at its
own classes. So we look at those alone, and count turns: a site whose turns make the model worse at them more
often than not is accused.

The evidence is a martingale, so a wrong accusation has the same small probability however often we look.
Ville 1939; mixture over the binomial: Robbins 1970, doi 10.1214/aoms/1177696786.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import comb
from typing import Any

ALL, NORM = "all", "norm"
"""What a test counts, beside single classes by their labels."""


def evidence(turns: int, worse: int) -> Fraction:
    """Likelihood of `worse` of `turns` under a share above one half, over its likelihood at one half.

    The shares above one half are mixed evenly. Of a site whose turns make the model worse half of the time or
    less, the evidence has a mean of at most 1 after any number of turns, and ever exceeds 1/alpha with
    probability at most alpha.

    Raises ValueError unless 0 <= worse <= turns.
    """
    if not 0 <= worse <= turns:
        raise ValueError(f"worse: found {worse} of {turns} turns, allowed 0 to {turns}")
    # 2 B(k+1, n-k+1) P(Beta(k+1, n-k+1) > 1/2) / 2^-n, and that tail is a binomial one
    tail = sum(comb(turns + 1, j) for j in range(worse + 1))
    return Fraction(tail, (turns + 1) * comb(turns, worse))


@dataclass(frozen=True)
class Accusation:
    """flag: "harm", or "norm" for updates above the norm bound. why: a sentence for the journal."""

    flag: str
    why: str


@dataclass
class HarmTest:
    """Evidence against each site, from the change that each of its turns made.

    false_alarm: probability that an honest site is accused at any time of a run. A third of it is spent on
    all classes that the site trains on, weighted by their samples; a third on single classes, of which it has
    an even share at least, so that a site that lies about one class alone is found too; and a third on norms:
    a site most of whose updates are above the bound boosts them, unless it honestly has far more samples.
    """

    false_alarm: float = 0.01
    _counts: dict[str, dict[str, list[int]]] = field(default_factory=dict)

    def add(self, site: str, held: Sequence[int | None], change: Sequence[float | None]) -> None:
        """One turn.

        held: (M,) samples of each class that the site trained on; None for a class that it withholds.
        change: (M,) what the model was worth on each class after the turn minus before; None where nobody
        measured. A turn without any class that is both held and measured is left out.
        """
        known = {
            label: (count, moved)
            for label, (count, moved) in enumerate(zip(held, change, strict=False))
            if count and moved is not None
        }
        if not known:
            return
        samples = sum(count for count, _ in known.values())
        self._add(site, ALL, sum(count * moved for count, moved in known.values()) < 0)
        for label, (count, moved) in known.items():
            if count * len(known) >= samples:
                self._add(site, str(label), moved < 0)

    def add_norm(self, site: str, above: bool) -> None:
        """One update. above: whether the norm bound scaled it down."""
        self._add(site, NORM, above)

    def _add(self, site: str, what: str, bad: bool) -> None:
        counts = self._counts.setdefault(site, {}).setdefault(what, [0, 0])
        counts[0] += 1
        counts[1] += bad

    def accused(self, classes: int) -> dict[str, Accusation]:
        """site -> what its turns did, for each site with enough evidence.

        classes: number of classes of the run, over which the share of single classes is divided.
        """
        found: dict[str, Accusation] = {}
        for site, tests in sorted(self._counts.items()):
            for what, (turns, bad) in sorted(tests.items(), key=lambda test: test[0] != ALL):
                alpha = self.false_alarm / 3 / (1 if what in (ALL, NORM) else classes)
                if 2 * bad > turns and evidence(turns, bad) > 1 / alpha:
                    found.setdefault(site, _accusation(what, turns, bad))
        return found

    def state_dict(self) -> dict[str, Any]:
        return {site: dict(tests) for site, tests in self._counts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._counts = {site: {what: list(n) for what, n in tests.items()} for site, tests in state.items()}


def _accusation(what: str, turns: int, bad: int) -> Accusation:
    if what == NORM:
        return Accusation(
            "norm", f"{bad} of {turns} updates were above the norm bound (bounds.norm_multiple)"
        )
    where = "the classes" if what == ALL else f"class {what}, one of those"
    return Accusation("harm", f"{bad} of {turns} turns made the model worse at {where} that it trains on")
