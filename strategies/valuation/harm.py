"""Which sites do nothing for the classes that they train on, or work against them.

A low contribution value is no accusation: where sites hold different classes, an honest site's turn makes
the model forget what others hold, and its value is negative. An honest site does work for its own classes. So
we look at those alone, in two ways. What a turn gained there is plain but rough: honest training overshoots,
and once the model is good, half of the turns lose a little. Whether the update points where the loss on them
falls is finer, but says nothing of how far it went. A turn counts against a site where both fall far behind
those of the other sites' turns, and a site is accused when more than half of its turns count against it.

The evidence is a martingale, so a wrong accusation has the same small probability however often we look.
Ville 1939; mixture over the binomial: Robbins 1970, doi 10.1214/aoms/1177696786.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import comb
from statistics import median
from typing import Any

from perennial.strategies.valuation.sweeps import ValuedTurn

HARM, GAIN, NORM = "harm", "no gain", "norm"
"""What a site is flagged for: losing at its own classes, doing nothing for them, boosting its updates."""
WHY = {
    HARM: "turns lost at the classes that the site trains on, and did not point where these call for",
    GAIN: "turns did next to nothing for the classes that the site trains on",
    NORM: "updates were above the norm bound (bounds.norm_multiple)",
}
LEAST_ALIGNMENT, LEAST_GAIN = 0.5, 0.1
"""Shares of the other sites' median alignment and gain below which a turn falls far behind."""
GOOD = 0.95
"""Worth of a model at a site's classes from which on its turn says nothing: there is nothing left to do."""
LEAST_OTHERS = 3
"""Other sites whose median one dishonest site among them does not move."""


def evidence(turns: int, worse: int) -> Fraction:
    """Likelihood of `worse` of `turns` under a share above one half, over its likelihood at one half.

    The shares above one half are mixed evenly. Of a site whose turns count against it half of the time or
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
    """flag: HARM, GAIN or NORM. why: a sentence for the journal."""

    flag: str
    why: str


@dataclass
class HarmTest:
    """Evidence against each site, from what each of its turns did.

    false_alarm: probability that an honest site is accused at any time of a run. Half of it is spent on turns
    that fall behind, and half on norms: a site most of whose updates are above the bound boosts them, unless
    it honestly has far more samples.
    """

    false_alarm: float = 0.01
    _counts: dict[str, dict[str, list[int]]] = field(default_factory=dict)

    def add(self, sweep: Sequence[ValuedTurn]) -> None:
        """The turns of one sweep; one without a gain or an alignment is left out.

        Nobody is judged by turns at a model that is good at the site's classes. Of a shorter update less gain
        is expected, because a site with few samples takes few steps. A sweep in which the others' updates
        point nowhere says nothing.
        """
        known = {
            turn.site: (turn.gain, turn.alignment, turn.norm)
            for turn in sweep
            if turn.gain is not None and turn.alignment is not None
        }
        good = {turn.site for turn in sweep if (turn.worth_before or 0.0) > GOOD}
        for site, (gain, alignment, norm) in known.items():
            others = [row for other, row in known.items() if other != site]
            if site in good or len(others) < LEAST_OTHERS:
                continue
            usual_gain, usual_alignment, usual_norm = map(median, zip(*others, strict=True))
            if usual_alignment > 0 and usual_norm > 0:
                expected = max(0.0, usual_gain) * min(1.0, norm / usual_norm)
                behind = alignment < LEAST_ALIGNMENT * usual_alignment and gain < LEAST_GAIN * expected
                self._add(site, GAIN, behind)
                self._add(site, HARM, behind and gain < 0)

    def add_norm(self, site: str, above: bool) -> None:
        """One update. above: whether the norm bound scaled it down."""
        self._add(site, NORM, above)

    def _add(self, site: str, what: str, bad: bool) -> None:
        counts = self._counts.setdefault(site, {}).setdefault(what, [0, 0])
        counts[0] += 1
        counts[1] += bad

    def accused(self) -> dict[str, Accusation]:
        """site -> what its turns did, for each site with enough evidence."""
        found: dict[str, Accusation] = {}
        for site, tests in sorted(self._counts.items()):
            for what in (GAIN, NORM):
                turns, bad = tests.get(what, (0, 0))
                if 2 * bad > turns and evidence(turns, bad) > 2 / self.false_alarm:
                    lost = tests[HARM][1] if what == GAIN else 0
                    flag, turns_meant = (HARM, lost) if 2 * lost > turns else (what, bad)
                    found.setdefault(site, Accusation(flag, f"{turns_meant} of {turns} {WHY[flag]}"))
        return found

    def behind(self, site: str) -> float | None:
        """Share of a site's turns that fell behind; None where none was compared."""
        turns, bad = self._counts.get(site, {}).get(GAIN, (0, 0))
        return bad / turns if turns else None

    def state_dict(self) -> dict[str, Any]:
        return {site: dict(tests) for site, tests in self._counts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._counts = {site: {what: list(n) for what, n in tests.items()} for site, tests in state.items()}
