"""The one floor below which nothing that is computed from data leaves a site: policy.min_samples.

It is asked of what a release is computed from, after every cut: a ring's segment, a class's exemplars, the
validation part, the samples mixed in one digest.
"""

from collections.abc import Sequence

from perennial.config.site import Release, SitePolicy
from perennial.foundation.errors import PolicyRefusal
from perennial.privacy.digest_config import DigestConfig

RELEASES: dict[Release, str] = {
    "update": "an update",
    "evaluate": "counts of right answers",
    "class_means": "a class's sum",
    "digest": "a digest",
    "sparsity": "a sparsity vector",
    "measurements": "a measurement",
    "statistics": "sums of features",
    "class_counts": "counts of samples",
    "compare_heads": "counts of right answers",
}


def exempt(policy: SitePolicy, release: Release) -> bool:
    """Whether policy.below_floor lets this release leave however few samples it is computed from."""
    return release in policy.below_floor


def check_floor(policy: SitePolicy, release: Release, samples: int) -> None:
    """Raises PolicyRefusal when a release comes from too few samples; their number is not told."""
    if samples < policy.min_samples and not exempt(policy, release):
        raise PolicyRefusal(
            f"policy.min_samples: {RELEASES[release]} would be computed from fewer than "
            f"{policy.min_samples} samples"
        )


def withheld(policy: SitePolicy, release: Release, cells: Sequence[int], *within: Sequence[int]) -> set[int]:
    """Indices of the counts that must not leave because they are below policy.min_samples.

    cells: a count of samples for each class or group. within: counts inside each cell that would leave with
    it, such as right answers; a cell is withheld too if such a count, or the rest of the cell, is below the
    floor.

    Empty cells are withheld too, and further ones, smallest first, until the withheld ones are two or more
    and have at least min_samples samples together. So nobody can compute one from a known total, or tell an
    empty class from a small one. With a floor of 1, or for an exempt release, nothing is withheld.
    """
    if policy.min_samples == 1 or exempt(policy, release):
        return set()
    least = [
        min(count, *(least for part in within for least in (part[cell], count - part[cell])))
        if within
        else count
        for cell, count in enumerate(cells)
    ]
    small = {cell for cell, count in enumerate(least) if count < policy.min_samples}
    rest = sorted((count, cell) for cell, count in enumerate(cells) if cell not in small)
    while small and rest and (len(small) < 2 or sum(cells[c] for c in small) < policy.min_samples):
        small.add(rest.pop(0)[1])
    return small


def samples_of_digest(config: DigestConfig) -> int:
    """Effective number of samples in one digest: 1 / (sum of squared weights), rounded down."""
    if config.weights is None:
        return config.per_digest
    return int(1 / sum(weight**2 for weight in config.weights) + 1e-6)
