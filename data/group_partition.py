"""Sites in groups: the classes of a site are those that its group shares and a few of its own.

The CIFAR-100 protocol of FedPerC (Yang et al. 2022, doi 10.18293/SEKE2022-100, section IV) has 4 groups of 5
sites, 20 classes shared in a group and 5 more at each site. It does not say whether two groups may share a
class; here they do not.
"""

import numpy as np

from perennial.foundation.errors import ConfigError


def group_of_site(sites: int, groups: int) -> np.ndarray:
    """(N,) group of each site: neighbours belong together, and groups differ by one site at most."""
    return np.arange(sites) * groups // sites


def group_holders(
    classes: int, sites: int, groups: int, shared: int, own: int, generator: np.random.Generator
) -> np.ndarray:
    """(C, N) bool: which site holds which class.

    A site's own classes are drawn from those that its group does not share, classes with the fewest holders
    first, so that no class is left out. Raises ConfigError where that is impossible.
    """
    key = "data.partition"
    if groups > sites:
        raise ConfigError(f"{key}.groups: found {groups}, allowed 1 to {sites}, the number of sites")
    if groups * shared > classes:
        raise ConfigError(
            f"{key}.shared_classes: found {shared}, but {groups} groups need {groups * shared} different "
            f"classes and the task has {classes}; allowed: up to {classes // groups}"
        )
    if own > classes - shared or groups * shared + sites * own < classes:
        least = max(0, -(-(classes - groups * shared) // sites))
        raise ConfigError(
            f"{key}.own_classes: found {own}; allowed: {least} to {classes - shared}, so that every one of "
            f"{classes} classes is held"
        )
    holds = np.zeros((classes, sites), dtype=bool)
    order = generator.permutation(classes)
    members = group_of_site(sites, groups)
    for group in range(groups):
        holds[np.ix_(order[group * shared : (group + 1) * shared], np.flatnonzero(members == group))] = True
    for site in generator.permutation(sites):
        free = generator.permutation(np.flatnonzero(~holds[:, site]))
        rarest = np.argsort(holds[free].sum(axis=1), kind="stable")[:own]
        holds[free[rarest], site] = True
    return holds
