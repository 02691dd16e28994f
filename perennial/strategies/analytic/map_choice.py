"""Chooses among feature maps in the first task, by validation samples, for the whole run.

Alternatives are compared each alone, so that no products of two of them are summed. The chosen ones of all
choices, and the maps without one, stand side by side afterwards, and from then on no other is asked for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from perennial.foundation.errors import DataError
from perennial.learning.analytic.solve import LinAlgError, LinearHead, Sums
from perennial.learning.analytic.statistics import Statistics, SumsForm
from perennial.models.feature_maps.fixed import FixedFeatures
from perennial.strategies.analytic.automatic import AutomaticHead
from perennial.strategies.analytic.heads import HeadSettings
from perennial.strategies.analytic.kept import KeptSums
from perennial.strategies.analytic.statistics_round import StatisticsRound


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
        return self.whole.only(
            self.chosen or [max(slot, key=lambda place: widths[place]) for slot in self.whole.slots]
        )

    def chosen_by(self, asking: StatisticsRound, settings: HeadSettings, classes: range) -> bool:
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
            rounds = {place: self._alone(asking, place) for place in slot}
            sums = {place: _sums(rounds[place], classes) for place in self._in_order(asking, rounds)}
            ranked: list[tuple[float, int]] = []
            rows: dict[int, list[dict[str, Any]]] = {}
            for place in slot:
                width, name = self.whole.widths[place], self.whole.facts[place]["map"]
                alone = self.whole.only([place])
                own = settings.over([width], [name], alone.of_rows, alone.fillers)
                known = range(asking.request.stamp.num_classes)
                ranked.append((own.ranked(rounds[place], Sums.of(sums[place].over(known)))[0][0], place))
                rows[place] = own.tried[:1]
            ranked.sort(key=lambda each: -each[0])
            found |= dict.fromkeys(slot, ranked[0][1])
            self.tried += [row for _, place in ranked for row in rows[place]]
        self.chosen = [found.get(slot[0], slot[0]) for slot in self.whole.slots]

    def over_all_maps(self, head: LinearHead) -> LinearHead:
        """The same head over the features of every map, as the run's model has them; 0 for unchosen ones."""
        if not self.there:
            return head
        assert self.whole is not None and self.chosen is not None
        weight = torch.zeros(len(head.bias), self.whole.width, dtype=torch.float64)
        # all maps share the length that the chosen ones share in the sums
        longer = math.sqrt(len(self.whole.maps) / len(self.chosen))
        weight[:, self.whole.places_of(self.chosen)] = longer * head.weight
        return LinearHead(weight, head.bias)

    def state(self) -> dict[str, Any]:
        """JSON-able values, which load() restores."""
        return {"maps": {"chosen": self.chosen, "tried": self.tried}} if self.there else {}

    def load(self, state: dict[str, Any]) -> None:
        if "maps" in state:
            self.chosen, self.tried = state["maps"]["chosen"], list(state["maps"]["tried"])

    def _alone(self, asking: StatisticsRound, place: int) -> StatisticsRound:
        assert self.whole is not None
        alone = self.whole.only([place])
        return replace(asking, features=alone.content, form=SumsForm(alone.width + 1))

    def _in_order(self, asking: StatisticsRound, rounds: dict[int, StatisticsRound]) -> Sequence[int]:
        """The alternatives, first the one whose masked sum sites were asked to open and did not."""
        pending = None if asking.masked is None else asking.masked.store.pending
        return sorted(rounds, key=lambda place: pending is None or rounds[place].about(1) != pending.model)


def _sums(asking: StatisticsRound, classes: range) -> Statistics:
    """What the sites' sums of the first task add up to. Raises DataError where fewer answer than must."""
    kept = KeptSums()
    for sites, statistics in asking.of_sites([*asking.request.sites], 1, classes):
        kept.add(1, sites, statistics)
    found, quorum = len(kept.contributions.get(1, {})), asking.request.quorum
    if kept.total is None or found < quorum:
        raise DataError(f"maps are not chosen yet: {found} sites sent sums to compare them by, of {quorum}")
    return kept.total
