"""Limits each site's influence on the sums that a head is solved from, as `bounds` say.

Kept and signed sums stay as they were sent: what counts follows from counts alone, and is found anew after a
withdrawal.
"""

from perennial.config.bounds import LEAST_SITES, BoundsConfig
from perennial.foundation.errors import ConfigError, DataError
from perennial.learning.analytic.influence import PARTS, parts_by_registration, parts_by_share
from perennial.learning.analytic.solve import Sums
from perennial.learning.analytic.statistics import EXACT_SAMPLES, Statistics
from perennial.strategies.analytic.kept import KeptSums


def require_own_sums(bounds: BoundsConfig, own: bool) -> None:
    """Raise ConfigError if bounds limit influence but the server lacks each site's own plain sums."""
    if (bounds.share or bounds.registered) and not own:
        raise ConfigError(
            "bounds.share, bounds.registered: each site's own sums are cut when the head is solved for; "
            "allowed with keep_sites and head gaussian or ridge, without privacy and without secure"
        )


def parts_of(kept: KeptSums, bounds: BoundsConfig) -> dict[tuple[int, str], int]:
    """(task, site) -> weight of its sums in units of 1/PARTS; sums of full weight are left out."""
    given = kept.contributions
    registered = parts_by_registration({site: kept.samples(site) for site in kept.sites}, bounds.registered)
    found = {}
    for task, of_task in given.items():
        names = sorted(of_task)
        counts = [of_task[site]["samples"] * registered[site] // PARTS for site in names]
        parts = [PARTS] * len(names)
        if bounds.share is not None and len(names) >= LEAST_SITES:
            parts = parts_by_share(counts, bounds.share)
        for site, part in zip(names, parts, strict=True):
            if (cut := max(1, registered[site] * part // PARTS)) < PARTS:
                found[task, site] = cut
    return found


def counted_sums(kept: KeptSums, bounds: BoundsConfig, classes: range) -> Sums:
    """The total of the kept sums, weighted as parts_of() says, with rows for these classes.

    Raises DataError if there are no sums, or more samples than weighted ones stay exact for; StateError
    if a site's own sums were not kept.
    """
    if kept.total is None:
        raise DataError("no site has sent sums yet")
    cut = parts_of(kept, bounds)
    if not cut:
        return Sums.of(kept.total.over(classes))
    if kept.total.samples >= EXACT_SAMPLES:
        raise DataError(
            f"bounds.share, bounds.registered: found {kept.total.samples} samples; allowed fewer than 2^20"
        )
    total = _scaled(kept.total, PARTS)
    for (task, site), parts in sorted(cut.items()):
        total = total - _scaled(kept.kept(task, site), PARTS - parts)
    sums = Sums.of(total.over(classes))
    return Sums(sums.gram.div_(PARTS), sums.sums / PARTS, sums.counts / PARTS)


def _scaled(found: Statistics, times: int) -> Statistics:
    return Statistics(found.gram * times, found.sums * times, found.counts * times, found.classes)
