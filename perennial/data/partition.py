"""Who holds which training sample: the division of each task's classes among simulated sites.

Each class is shuffled by a stream of its own and cut by a row of counts, so that a site's share of a class is
fixed for the whole run, whatever other tasks there are or will be.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from perennial.data.tasks_config import PartitionConfig
from perennial.foundation.errors import ConfigError
from perennial.foundation.streams import stream


def apportion(totals: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """(C, N) int64 whose row c sums to totals[c] and is as close to shares[c] as whole numbers come.

    totals: (C,) counts. shares: (C, N), non-negative, not all zero in a row; need not sum to 1.
    Largest remainder; equal remainders go to the lower index.
    """
    exact = totals[:, None] * (shares / shares.sum(axis=1, keepdims=True))
    counts = np.floor(exact).astype(np.int64)
    rank = np.argsort(np.argsort(counts - exact, axis=1, kind="stable"), axis=1, kind="stable")
    return counts + (rank < (totals - counts.sum(axis=1))[:, None])


MOST_TRIES = 1000


class Partition(NamedTuple):
    """Which site holds which training samples.

    indices: for each site, sorted (n_k,) int64; disjoint, complete.
    notes: what a person should know.
    """

    indices: list[np.ndarray]
    notes: tuple[str, ...]


def partition_samples(
    config: PartitionConfig,
    labels: np.ndarray,
    sites: int,
    seed: int,
    boundaries: Sequence[int],
    *,
    names: Sequence[str],
    site_of: np.ndarray | None = None,
    patients: np.ndarray | None = None,
) -> Partition:
    """Divide samples with these internal labels, (n,) int64, among sites.

    boundaries: of the schedule; each task is divided on its own. names: of the classes, for notes. site_of:
    (n,) index of each sample's site, for the kind "natural". patients: (n,) patient number of each sample;
    then the division is close to the one asked for, and every patient is at one site. Raises ConfigError
    where the division asked for is impossible.
    """
    if config.kind == "natural":
        if site_of is None:
            raise ConfigError(
                "data.partition.kind: 'natural', but the data does not say which site holds a sample"
            )
        return Partition([np.flatnonzero(site_of == site) for site in range(sites)], ())
    by_class = np.split(
        np.argsort(labels, kind="stable"), np.cumsum(np.bincount(labels, minlength=boundaries[-1]))[:-1]
    )
    shares: list[list[np.ndarray]] = [[] for _ in range(sites)]
    notes = []
    for task, (low, high) in enumerate(pairwise(boundaries), start=1):
        totals = np.array([len(rows) for rows in by_class[low:high]], dtype=np.int64)
        counts = _draw_counts(config, totals, sites, seed, task)
        for label, total, row in zip(range(low, high), totals.tolist(), counts, strict=True):
            if config.kind != "dirichlet" and 0 < total < _count_holders(config, sites, high - low):
                holders = int((row > 0).sum())
                notes.append(
                    f"class {names[label]!r}: {total} samples, so only {holders} of {sites} sites hold it"
                )
            shuffled = stream(seed, "split", label).permutation(by_class[label])
            for share, part in zip(shares, np.split(shuffled, np.cumsum(row)[:-1]), strict=True):
                share.append(part)
    divided = [np.sort(np.concatenate(share)) for share in shares]
    return Partition(
        divided if patients is None else keep_patients_whole(divided, patients, seed), tuple(notes)
    )


def keep_patients_whole(shares: Sequence[np.ndarray], patients: np.ndarray, seed: int) -> list[np.ndarray]:
    """The shares, with all rows of each patient moved to the site that held most of them.

    shares: row indices of each site. patients: (n,) int64, patient number of each row, from 0. Equal counts:
    by a draw.
    """
    held = np.zeros((int(patients.max(initial=-1)) + 1, len(shares)))
    for site, rows in enumerate(shares):
        np.add.at(held[:, site], patients[rows], 1)
    held += stream(seed, "patient-site").random(held.shape) / 2
    site_of = held.argmax(axis=1) if len(held) else np.empty(0, dtype=np.int64)
    rows = np.sort(np.concatenate(shares))
    return [rows[site_of[patients[rows]] == site] for site in range(len(shares))]


def share_out(
    labels: np.ndarray,
    rows: np.ndarray,
    held: np.ndarray,
    names: Sequence[str],
    seed: int,
    patients: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Divide the rows of a central test set among N sites in proportion to their training samples.

    Returns sorted row indices for each site. labels: (n,), internal; rows: (n,) int64. held: (classes, N)
    training samples; a class that no site trains on is divided equally. names: of the classes. patients: (n,)
    patient number of each row; each patient stays at one site.
    """
    shares: list[list[np.ndarray]] = [[] for _ in range(held.shape[1])]
    for label in map(int, np.unique(labels)):
        group = np.flatnonzero(labels == label)
        weights = held[label] if held[label].any() else np.ones(held.shape[1], dtype=np.int64)
        counts = apportion(np.array([len(group)]), weights[None])[0]
        shuffled = stream(seed, "test-share", names[label]).permutation(group)
        for share, part in zip(shares, np.split(shuffled, np.cumsum(counts)[:-1]), strict=True):
            share.append(part)
    none = np.empty(0, dtype=np.int64)
    indices = [np.sort(np.concatenate([none, *share])) for share in shares]
    indices = indices if patients is None else keep_patients_whole(indices, patients, seed)
    return [rows[share] for share in indices]


def _draw_counts(config: PartitionConfig, totals: np.ndarray, sites: int, seed: int, task: int) -> np.ndarray:
    """(C, N) samples of each class of one task at each site; row c sums to totals[c], (C,)."""
    match config.kind:
        case "dirichlet":
            return _draw_dirichlet(config, totals, sites, seed, task)
        case "class_subset":
            return _draw_class_subsets(config, totals, sites, seed, task)
        case "groups":
            return _draw_groups(config, totals, sites, seed, task)
        case _:
            return _divide_equally(totals, np.ones((len(totals), sites), dtype=bool), task)


def _count_holders(config: PartitionConfig, sites: int, classes: int) -> int:
    """The fewest sites that a class of the task is meant for."""
    if config.kind == "groups":
        return 1
    if config.kind != "class_subset":
        return sites
    each = 1 if config.classes_per_site == "disjoint" else config.classes_per_site or 1
    return max(1, sites * each // classes)


def _divide_equally(totals: np.ndarray, holds: np.ndarray, task: int) -> np.ndarray:
    """Each class in equal parts among the sites that hold it, (C, N) bool.

    What is left over goes round the sites, on from where the class before it stopped, so that no site is
    always the larger one.
    """
    counts = np.zeros(holds.shape, dtype=np.int64)
    start = task - 1
    for row, total, holder in zip(counts, totals.tolist(), holds, strict=True):
        members = np.flatnonzero(holder)
        whole, more = divmod(total, len(members))
        row[members] = whole
        row[np.roll(members, -(start % len(members)))[:more]] += 1
        start += more
    return counts


def _draw_dirichlet(
    config: PartitionConfig, totals: np.ndarray, sites: int, seed: int, task: int
) -> np.ndarray:
    """p_c ~ Dirichlet(alpha) for each class, drawn anew until every site has min_samples of the task.

    Hsu et al. 2019 (arXiv 1909.06335).
    """
    setting = f"data.partition: alpha {config.alpha:g} and min_samples {config.min_samples}"
    if totals.sum() < sites * config.min_samples:
        raise ConfigError(
            f"{setting}: task {task} has {totals.sum()} training samples, but {sites} sites need "
            f"{sites * config.min_samples}; lower min_samples or the number of sites"
        )
    for attempt in range(MOST_TRIES):
        generator = stream(seed, "dirichlet", task, attempt)
        shares = generator.dirichlet(np.full(sites, config.alpha), size=len(totals))
        counts = apportion(totals, shares)
        if counts.sum(axis=0).min() >= config.min_samples:
            return counts
    raise ConfigError(
        f"{setting}: none of {MOST_TRIES} draws gave each of {sites} sites that many of the {totals.sum()} "
        f"training samples of task {task}; raise alpha, or lower min_samples or the number of sites"
    )


def _draw_groups(config: PartitionConfig, totals: np.ndarray, sites: int, seed: int, task: int) -> np.ndarray:
    """Each class in equal parts among the sites of the groups that hold it."""
    assert config.groups is not None and config.shared_classes is not None
    generator = stream(seed, "site-groups", task)
    holds = group_holders(
        len(totals), sites, config.groups, config.shared_classes, config.own_classes, generator
    )
    return _divide_equally(totals, holds, task)


def _draw_class_subsets(
    config: PartitionConfig, totals: np.ndarray, sites: int, seed: int, task: int
) -> np.ndarray:
    """Each site holds s of the C classes of the task; each class is cut equally among its holders.

    The classes are dealt like cards, s to a site, and shuffled anew when all are dealt: no class is left out,
    and each has floor(N s / C) or ceil(N s / C) holders. "disjoint" deals them once, one by one.
    """
    classes, wanted = len(totals), config.classes_per_site
    generator = stream(seed, "class-subset", task)
    holds = np.zeros((classes, sites), dtype=bool)
    key = "data.partition.classes_per_site"
    if wanted == "disjoint":
        if classes < sites:
            raise ConfigError(f"{key}: 'disjoint', but task {task} has {classes} classes for {sites} sites")
        holds[generator.permutation(classes), np.resize(generator.permutation(sites), classes)] = True
        return _divide_equally(totals, holds, task)
    assert wanted is not None
    least = -(-classes // sites)
    if not least <= wanted <= classes:
        raise ConfigError(
            f"{key}: {wanted}, but task {task} has {classes} classes for {sites} sites; "
            f"allowed: {least} to {classes}"
        )
    deck = np.empty(0, dtype=np.int64)
    for site in generator.permutation(sites):
        hand, deck = deck[:wanted], deck[wanted:]
        if len(hand) < wanted:
            shuffled = generator.permutation(classes)
            more = shuffled[~np.isin(shuffled, hand)][: wanted - len(hand)]
            hand, deck = np.concatenate([hand, more]), shuffled[~np.isin(shuffled, more)]
        holds[hand, site] = True
    return _divide_equally(totals, holds, task)


def group_of_site(sites: int, groups: int) -> np.ndarray:
    """(N,) group of each site: consecutive sites share one, and group sizes differ by 1 at most."""
    return np.arange(sites) * groups // sites


def group_holders(
    classes: int, sites: int, groups: int, shared: int, own: int, generator: np.random.Generator
) -> np.ndarray:
    """(C, N) bool: which site holds which class, in groups of sites that share classes.

    The CIFAR-100 protocol of FedPerC (Yang et al. 2022, doi 10.18293/SEKE2022-100, section IV) has 4 groups
    of 5 sites, 20 classes shared in a group and 5 more at each site. It does not say whether two groups may
    share a class; here they do not.

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
