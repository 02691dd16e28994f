"""Bounds on a round's replies that follow from what earlier rounds admitted.

So the order in which replies arrive decides nothing.

A median is moved by a minority of dishonest sites no further than to an honest site's figure. What is bounded
counts as bounded when the next round's bounds are found.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from perennial.config.bounds import LEAST_SITES, BoundsConfig
from perennial.learning.analytic.influence import level
from perennial.protocol.tensors import Tensors
from perennial.strategies.round.gate import Admitted, Rejected

NORMS, COUNTS, MET = "norms", "counts", "met"


@dataclass
class RunningBounds:
    """Bounds an update's norm by earlier rounds' medians, and a site's samples by the last round's counts.

    state: a dict of the checkpoint, kept up to date here: median norms of the latest rounds, samples of each
    site of the last one, and who met a bound.
    """

    config: BoundsConfig
    state: dict[str, Any]

    def __post_init__(self) -> None:
        self.state.setdefault(NORMS, [])
        self.state.setdefault(COUNTS, {})
        self.state.setdefault(MET, {})
        self._first, self._first_counts = 0.0, dict[str, int]()

    @property
    def met(self) -> dict[str, dict[str, int]]:
        """site -> in how many rounds its update was scaled down, and its samples were capped."""
        return self.state[MET]

    @property
    def waiting(self) -> bool:
        """Whether there is no earlier round, so that bounds must follow from the round's own replies."""
        wanted = self.config.norm_multiple is not None or self.config.most_share < 1
        return wanted and not self.state[NORMS]

    def see_all(self, replies: Iterable[Admitted]) -> None:
        """Take the bounds from these replies, all of a first round, before any of them is bounded."""
        self._first, self._first_counts = _told(replies)

    def touches(self, reply: Admitted) -> bool:
        """Whether a bound would change the reply, or drop it."""
        return self.exceeds(reply.norm) or reply.num_examples > self._most_samples(
            reply.site, reply.num_examples
        )

    def bounded(self, reply: Admitted, scalable: bool) -> Admitted:
        """The reply with its norm and samples bounded, and a note for each change.

        scalable: whether the method accepts scaled updates. Raises Rejected for an update
        above the bound that is to be dropped.
        """
        notes = list(reply.notes)
        samples, most = reply.num_examples, self._most_samples(reply.site, reply.num_examples)
        if samples > most:
            key = "registered" if reply.site in self.config.registered else "share"
            notes.append(f"has {samples} samples, and counts as {most} (bounds.{key})")
            reply = replace(reply, num_examples=most, capped=True)
        limit = self._longest
        if limit is None or reply.norm <= limit or not (scalable or self.config.on_norm == "drop"):
            return replace(reply, notes=tuple(notes))
        sentence = f"update: norm {reply.norm:.4g} is above {limit:.4g}, {self.config.norm_multiple:g} times "
        sentence += "the median of former rounds (bounds.norm_multiple)"
        if self.config.on_norm == "drop":
            raise Rejected(sentence)
        factor = limit / reply.norm
        update = Tensors({name: tensor * factor for name, tensor in reply.update.items()})
        notes.append(f"{sentence}; scaled down")
        return replace(reply, update=update, norm=limit, notes=tuple(notes), scaled=True)

    def round_done(self, replies: Iterable[Admitted]) -> None:
        """Note norms and samples of the replies in a round's model, for later bounds, and who met a bound."""
        replies = list(replies)
        listed = bool(self.config.in_words)
        for reply in replies:
            if listed or reply.scaled or reply.capped:
                met = self._met(reply.site)
                met["scaled"] += reply.scaled
                met["capped"] += reply.capped
        median_norm, counts = _told(replies)
        if counts:
            self.state[NORMS] = [*self.state[NORMS], median_norm][-self.config.window :]
            self.state[COUNTS] = counts
        self._first, self._first_counts = 0.0, {}

    def exceeds(self, norm: float) -> bool:
        """Whether an update of this norm is above the bound."""
        limit = self._longest
        return limit is not None and norm > limit

    def _met(self, site: str) -> dict[str, int]:
        return self.state[MET].setdefault(site, {"scaled": 0, "capped": 0})

    def _most_samples(self, site: str, claimed: int) -> int:
        if site in self.config.registered:
            return self.config.registered[site]
        counts = self.state[COUNTS] or self._first_counts
        others = [count for name, count in counts.items() if name != site]
        if len(others) + 1 < LEAST_SITES:
            return claimed
        # the level of whole counts may come out a rounding below a whole number
        return max(1, int(min(claimed, level([*others, claimed], self.config.most_share) + 1e-6)))

    @property
    def _longest(self) -> float | None:
        usual, multiple = max(self.state[NORMS], default=self._first), self.config.norm_multiple
        # if the median update is zero there is no size to compare with
        return multiple * usual if multiple is not None and usual > 0 else None


def _told(replies: Iterable[Admitted]) -> tuple[float, dict[str, int]]:
    """(median norm, samples of each site) of the replies that sites sent themselves."""
    sent = [reply for reply in replies if not reply.stand_in]
    norms = [reply.norm for reply in sent]
    return median(norms) if norms else 0.0, {reply.site: reply.num_examples for reply in sent}
