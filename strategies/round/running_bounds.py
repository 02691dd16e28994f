"""Bounds on a round's replies that follow from what former rounds admitted.

So the order in which replies arrive decides nothing.

A median is moved by a minority of dishonest sites no further than to an honest site's figure, and what is
bounded enters the next median as bounded.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from perennial.config.bounds import BoundsConfig
from perennial.protocol.tensors import Tensors
from perennial.strategies.round.gate import Admitted, Rejected

NORMS, SAMPLES, MET = "norms", "samples", "met"


@dataclass
class RunningBounds:
    """Bounds on updates that follow from the medians of earlier rounds.

    state: a dict of the checkpoint, kept up to date here: medians of the latest rounds, and who met a bound.
    """

    config: BoundsConfig
    state: dict[str, Any]

    def __post_init__(self) -> None:
        for name in (NORMS, SAMPLES):
            self.state.setdefault(name, [])
        self.state.setdefault(MET, {})
        self._first: dict[str, float] = {}

    @property
    def met(self) -> dict[str, dict[str, int]]:
        """site -> in how many rounds its update was scaled down, or its claim capped."""
        return self.state[MET]

    @property
    def waiting(self) -> bool:
        """Whether there is no former round, so that the round's own replies set the medians."""
        wanted = self.config.norm_multiple is not None or self.config.samples_multiple is not None
        return wanted and not self.state[NORMS]

    def see_all(self, replies: Iterable[Admitted]) -> None:
        """The replies of a first round, before any of them is bounded, or the first turns of a ring."""
        self._first = _medians(replies)

    def touches(self, reply: Admitted) -> bool:
        """Whether a bound changes the reply, or drops it."""
        most = self._most_samples(reply.site)
        return self.exceeds(reply.norm) or (most is not None and reply.num_examples > most)

    def bounded(self, reply: Admitted, scalable: bool) -> Admitted:
        """The reply as it counts, with a note for each change.

        scalable: whether the method takes a part of an update for the whole. Raises Rejected for an update
        above the bound that is to be dropped.
        """
        notes = list(reply.notes)
        samples, most = reply.num_examples, self._most_samples(reply.site)
        if most is not None and samples > most:
            notes.append(f"claims {samples} samples, and counts as {most} (bounds)")
            reply = replace(reply, num_examples=most, capped=True)
        limit = self._limit(NORMS, self.config.norm_multiple)
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
        """Remember the medians of a round that came to something, and who met a bound.

        replies: those in the model.
        """
        replies = list(replies)
        for reply in replies:
            if reply.scaled or reply.capped:
                met = self._met(reply.site)
                met["scaled"] += reply.scaled
                met["capped"] += reply.capped
        for name, value in _medians(replies).items():
            self.state[name] = [*self.state[name], value][-self.config.window :]
        self._first = {}

    def exceeds(self, norm: float) -> bool:
        """Whether an update of this norm is above the bound."""
        limit = self._limit(NORMS, self.config.norm_multiple)
        return limit is not None and norm > limit

    def _met(self, site: str) -> dict[str, int]:
        return self.state[MET].setdefault(site, {"scaled": 0, "capped": 0})

    def _most_samples(self, site: str) -> int | None:
        if site in self.config.registered:
            return self.config.registered[site]
        limit = self._limit(SAMPLES, self.config.samples_multiple)
        return None if limit is None else max(1, int(limit))

    def _limit(self, name: str, multiple: float | None) -> float | None:
        usual = max(self.state[name], default=self._first.get(name, 0.0))
        # if the median update is zero there is no size to compare with
        return multiple * usual if multiple is not None and usual > 0 else None


def _medians(replies: Iterable[Admitted]) -> dict[str, float]:
    honest = [reply for reply in replies if not reply.stand_in]
    if not honest:
        return {}
    return {
        NORMS: float(median(reply.norm for reply in honest)),
        SAMPLES: float(median(reply.num_examples for reply in honest)),
    }
