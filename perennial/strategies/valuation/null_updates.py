"""Flags sites whose every update was zero: they take part and add nothing."""

from dataclasses import dataclass, field

NULL_UPDATE = 1e-8
"""Norm of an update as a share of the model's, below which the update counts as zero."""
NULL_UPDATES = 5
"""Updates after which a site whose every update was zero is flagged."""


@dataclass(frozen=True)
class NullUpdates:
    """Counts of zero updates. counts: site -> [updates that were zero, all of its updates]."""

    counts: dict[str, list[int]] = field(default_factory=dict)

    def count(self, site: str, null: bool) -> None:
        """Count one update of a site. null: whether it was zero."""
        zero, updates = self.counts.get(site, (0, 0))
        self.counts[site] = [zero + null, updates + 1]

    @property
    def flags(self) -> dict[str, str]:
        """site -> why it is flagged."""
        return {site: "null update" for site, (zero, n) in self.counts.items() if zero == n >= NULL_UPDATES}

    def newly_flagged(self, before: set[str]) -> list[str]:
        """A sentence for each site that is flagged and was not before."""
        return [
            f"site {site}: flagged ({flag}): every update it sent was zero"
            for site, flag in self.flags.items()
            if site not in before
        ]
