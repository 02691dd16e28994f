"""Facts about a method that never change during a run, and are read before it starts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Traits:
    """What a method allows and needs.

    staleness: rounds by which a reply may be late and still be used.
    waits_for_busy_sites: a round waits for sites that work on an earlier one if too few others are there.
    accepts_scaled_updates: an update may be scaled down; not if the site remembers the whole of it.
    runs_per_cluster: a cluster can have a strategy of this kind, beside those of other clusters.
    aggregates_in_parallel: a round is one exchange with all sites, whose replies go to one aggregator; a ring
    has hops instead.
    compares_updates: updates are compared with each other, whole.
    imputes_absent_sites: it makes updates in place of sites that do not answer.
    requires: what the method needs and Flower's own start() with other people's ClientApps does not give, in
    words; without it another method would run under this one's name. "": nothing.
    """

    staleness: int = 0
    waits_for_busy_sites: bool = True
    accepts_scaled_updates: bool = True
    runs_per_cluster: bool = True
    aggregates_in_parallel: bool = True
    compares_updates: bool = False
    imputes_absent_sites: bool = False
    requires: str = ""
