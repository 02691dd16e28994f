"""Compares sites by their sums alone: whose records help whom, and whether they mean the same by a class.

The squared error of a ridge head on a site's records follows from the site's sums, so a head of the other
sites can be judged out of sample with no further exchange. docs/methods/analytic.md says how to read it.

Shapes: K sites, C classes, D features with the constant, d = D - 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, mode

import torch
from torch import Tensor

from perennial.foundation.errors import DataError
from perennial.learning.analytic.solve import LinearHead, Sums, choose_by_gcv, solve_ridge

LAMBDAS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Shrinkages that cross-validation chooses among, from the sums without the site that is judged."""
LEAST_KNOWN = 0.9
"""Share of a site's records that must be of classes that others have, for the others to judge it."""
LEAST_RECORDS = 10
"""Records of a class at each of two sites that are compared."""
WITHIN_SHRINKAGE = 0.05
LEAST_GAIN = 0.05
"""Share of the squared distances between class means that another order of the labels must save."""
UNLIKE = 0.1
"""Correlation of class means below which a site's classes resemble nobody's."""


@dataclass(frozen=True)
class Judge:
    """The ridge head by which sites judge each other: that of the run, as far as it is one.

    places: (k,) indices of the features that it sees; None: all. shrinkage: None is chosen by generalised
    cross-validation, without the site that is judged.
    """

    places: Tensor | None = None
    shrinkage: float | None = None

    def seen(self, sums: Sums) -> Sums:
        """The sums of the features that the head sees."""
        return sums if self.places is None else sums.of_features(self.places)

    def choose_shrinkage(self, sums: Sums) -> float:
        """The shrinkage for these sums. Raises DataError if they have no ridge solution."""
        if self.shrinkage is not None:
            return self.shrinkage
        return choose_by_gcv(sums, LAMBDAS)


EVERYTHING = Judge()


@dataclass(frozen=True)
class SiteRow:
    """One site, judged by heads that are solved from the other sites' sums.

    apart: mean squared error of their head on its records; None: the site was not judged.
    skill: 1 - apart / error of a constant answer by the others' class frequencies.
    benefit: other site -> by how much its records lower the error, as a share of apart; negative: raise it.
    """

    apart: float | None
    skill: float | None
    benefit: dict[str, float]


@dataclass(frozen=True)
class CrossSite:
    """A row for each site, and which sites should be looked at.

    given: site -> median of the benefit that its records have for the others.
    marked: site -> in words, why a person should look at it.
    features: how many features the heads were solved on, after projection.
    """

    rows: dict[str, SiteRow]
    given: dict[str, float]
    marked: dict[str, str]
    features: int


def measure_error(head: LinearHead, sums: Sums, known: Tensor) -> float | None:
    """Mean squared error of a head's scores against the class indicators, over classes that it knows.

    sums: of the records that judge it. known: (C,) bool, the classes to score. Returns None if the sums have
    no records of these classes. A class that is not known has a bias of -1e9 and is left out.
    """
    records = float(sums.counts[known].sum())
    if records <= 0:
        return None
    return (_score(head, sums, known) + records) / records


def _score(head: LinearHead, sums: Sums, known: Tensor) -> float:
    """Squared scores minus twice those of the true classes, over all records."""
    # the site's records of classes that the head does not know cannot be taken out of its products, so each
    # known column is judged on all of them, as an indicator that is 0 there
    weight = torch.cat([head.weight[known], head.bias[known, None] / sums.constant], dim=1)
    quadratic = ((weight @ sums.gram) * weight).sum()
    return float(quadratic - 2 * (weight * sums.sums[known]).sum())


def guess_error(frequency: Tensor, sums: Sums, known: Tensor) -> float:
    """error_on for a head that always answers with `frequency`, (C,): the others' class frequencies."""
    records, share = sums.counts[known], frequency[known]
    every = float(sums.counts.sum())
    total = every * float(share.square().sum()) - 2 * float((share * records).sum()) + float(records.sum())
    return total / float(records.sum())


def cross_site(sites: Mapping[str, Sums], judge: Judge = EVERYTHING) -> CrossSite:
    """Compare sites by their sums, each over all tasks together, of the features that `judge` sees.

    In the heads that judge, no site counts as more records than the median site: one that multiplies its sums
    would make the others' model its own, and they would seem to contradict it. For the same reason sites are
    marked one by one, the worst first, and the next by the table without it. A site of whose records more
    than a tenth are of classes that nobody else has is not judged.

    Raises DataError for fewer than three sites: without one of two nobody is left to judge it by, and a pair
    is left out for a third's benefit. One factorisation for each site, and one or two for each pair.
    """
    if len(sites) < 3:
        raise DataError(f"cross-site table: found {len(sites)} sites, allowed three or more")
    first = table = _build_table(sites, judge)
    left, marked = dict(sites), {}
    while found := _find_marked(table.rows, compare_labels(left)):
        worst = min(found, key=lambda name: (table.rows[name].skill or 0.0, table.given.get(name, 0.0)))
        marked[worst] = found[worst]
        del left[worst]
        if len(left) < 3:
            break
        table = _build_table(left, judge)
    return replace(first, marked=marked)


def _build_table(sites: Mapping[str, Sums], judge: Judge) -> CrossSite:
    """The table, with nobody marked."""
    names = sorted(sites)
    most = median(float(each.counts.sum()) for each in sites.values())
    weighed = {name: _cap_records(each, most) for name, each in sites.items()}
    total = add_sums(list(weighed.values()))
    rows: dict[str, SiteRow] = {}
    judged: dict[str, tuple[float, LinearHead]] = {}
    for name in names:
        others = _subtract(total, weighed[name])
        known = others.counts > 0
        rows[name] = SiteRow(None, None, {})
        if not _is_known(sites[name], known):
            continue
        shrinkage = judge.choose_shrinkage(others)
        head = solve_ridge(others, shrinkage)
        apart = measure_error(head, sites[name], known)
        assert apart is not None
        guess = guess_error(others.counts / others.counts.sum(), sites[name], known)
        judged[name] = shrinkage, head
        rows[name] = SiteRow(apart, 1 - apart / guess, {})
    for place, one in enumerate(names):
        for other in names[place + 1 :]:
            rest = _subtract(_subtract(total, weighed[one]), weighed[other])
            known = rest.counts > 0
            heads: dict[float, LinearHead] = {}
            for name, left_out in ((one, other), (other, one)):
                if name not in judged or not (
                    _is_known(sites[name], known) and _is_known(sites[left_out], known)
                ):
                    continue
                shrinkage, with_it = judged[name]
                heads[shrinkage] = head = heads.get(shrinkage) or solve_ridge(rest, shrinkage)
                # both on the classes that are known without the other site
                before, after = (
                    measure_error(head, sites[name], known),
                    measure_error(with_it, sites[name], known),
                )
                if before is not None and after:
                    rows[name].benefit[left_out] = (before - after) / after
    given = {
        name: median(values)
        for name in names
        if (values := [row.benefit[name] for row in rows.values() if name in row.benefit])
    }
    return CrossSite(rows, given, {}, len(total.gram) - 1)


def _cap_records(sums: Sums, records: float) -> Sums:
    """Sums that count as no more than so many records."""
    own = float(sums.counts.sum())
    factor = min(1.0, records / own) if own else 1.0
    return sums if factor == 1.0 else Sums(factor * sums.gram, factor * sums.sums, factor * sums.counts)


def _is_known(sums: Sums, known: Tensor) -> bool:
    """Whether enough of a site's records are of classes that the others have, who must have two.

    With one class there is nothing to tell apart: a guess by frequency is always right.
    """
    every = float(sums.counts.sum())
    return every > 0 and int(known.sum()) > 1 and float(sums.counts[known].sum()) >= LEAST_KNOWN * every


@dataclass(frozen=True)
class LabelCheck:
    """How a site's labels fit those of the other sites.

    contradicted: label -> the label that most of the others would give its records.
    likeness: correlation of the site's class means with another site's, each about their centre, in
        within-class deviations; the median over the other sites. None: no other site can be compared.
    few: whether others could be compared if they and the site had more records of their common classes.
    """

    contradicted: dict[int, int]
    likeness: float | None
    few: bool


def _find_marked(rows: Mapping[str, SiteRow], checks: Mapping[str, LabelCheck]) -> dict[str, str]:
    """Who is looked at: contradicted labels, or a skill below 0 of classes that resemble nobody's.

    A site of too few records resembles nobody by chance, which is no reason to name it.
    A skill below 0 alone is no reason, since another camera has it too; nor is it where most sites' skill is
    below 0, because the features, or the records of so early a task, then say too little of anybody.
    """
    skills = {name: row.skill for name, row in rows.items() if row.skill is not None}
    telling = bool(skills) and median(skills.values()) > 0
    found = {}
    for name, row in rows.items():
        check = checks.get(name)
        if check is not None and check.contradicted:
            words = [f"its class {one} for their {other}" for one, other in check.contradicted.items()]
            found[name] = f"most other sites take {' and '.join(words)}: are labels mixed up?"
            continue
        unlike = check is not None and not check.few and (check.likeness is None or check.likeness < UNLIKE)
        if telling and unlike and row.skill is not None and row.skill < 0:
            found[name] = f"the others' model fits its records worse than a guess: skill {row.skill:.2f}"
    return found


def compare_labels(sites: Mapping[str, Sums], least: int = LEAST_RECORDS) -> dict[str, LabelCheck]:
    """Compare the labels of each two sites over the classes of which both have `least` records or more.

    For each pair the order of labels is sought under which the class means lie closest. A label is
    contradicted by the pair where another one fits so, and the whole order saves LEAST_GAIN. It counts where
    more than half of the other sites, and two at least, contradict it. In the covariance no site counts as
    more records than the median site. Returns {} where there are too few records for a covariance.
    """
    # SciPy takes a tenth of a second to import, and nothing else in a run needs it
    from scipy.optimize import linear_sum_assignment

    most = median(float(each.counts.sum()) for each in sites.values())
    means = _whiten_means({name: _cap_records(each, most) for name, each in sites.items()})
    if means is None:
        return {}
    found = {}
    for name in sites:
        votes: dict[int, list[int | None]] = {}
        likeness, share_classes = [], False
        for other in sites:
            if other == name:
                continue
            fewer = torch.minimum(sites[name].counts, sites[other].counts)
            share_classes |= int((fewer > 0).sum()) > 1
            both = fewer >= least
            if int(both.sum()) < 2:
                continue
            labels = both.nonzero()[:, 0].tolist()
            mine, theirs = means.whitened[name][both], means.whitened[other][both]
            distances = torch.cdist(mine, theirs).square().numpy()
            rows, columns = linear_sum_assignment(distances)
            saved = 1 - distances[rows, columns].sum() / max(distances.trace(), 1e-300)
            for row, column in zip(rows, columns, strict=True):
                says = labels[column] if row != column and saved > LEAST_GAIN else None
                votes.setdefault(labels[row], []).append(says)
            mine, theirs = mine - mine.mean(0), theirs - theirs.mean(0)
            likeness.append(float((mine * theirs).sum() / (mine.norm() * theirs.norm()).clamp_min(1e-300)))
        contradicted = {}
        for label, said in sorted(votes.items()):
            against = [each for each in said if each is not None]
            if len(said) > 1 and 2 * len(against) > len(said):
                contradicted[label] = mode(against)
        few = share_classes and not likeness
        found[name] = LabelCheck(contradicted, median(likeness) if likeness else None, few)
    return found


@dataclass(frozen=True)
class _Means:
    """Class means of sites, in within-class deviations.

    whitened: site -> (C, d). directions: the effective number of them. correction: the share of a squared
    distance that is not due to the covariance's own error.
    """

    whitened: dict[str, Tensor]
    directions: float
    correction: float


def _whiten_means(sites: Mapping[str, Sums]) -> _Means | None:
    """Class means by the within-class covariance of all sites, about each site's own class means.

    The covariance is shrunk by WITHIN_SHRINKAGE of its mean diagonal. None: there are too few records.
    """
    width = len(next(iter(sites.values())).gram) - 1
    within, records, held = torch.zeros(width, width, dtype=torch.float64), 0.0, 0
    for sums in sites.values():
        there = sums.counts > 0
        rows = sums.sums[there, :-1] / sums.counts[there, None].sqrt()
        within += sums.gram[:-1, :-1] - rows.T @ rows
        records, held = records + float(sums.counts.sum()), held + int(there.sum())
    freedom = records - held
    if freedom < 1:
        return None
    covariance = within / freedom
    shrunk = covariance.clone()
    shrunk.diagonal().add_(WITHIN_SHRINKAGE * float(covariance.diagonal().mean()))
    factor, failed = torch.linalg.cholesky_ex(shrunk)
    if failed:
        return None
    directions = float(torch.cholesky_solve(covariance, factor).trace())
    correction = 1 - directions / freedom
    if correction <= 0:
        return None
    whitened = {
        name: torch.linalg.solve_triangular(
            factor, (sums.sums[:, :-1] / sums.counts.clamp_min(1e-300)[:, None]).T, upper=False
        ).T
        for name, sums in sites.items()
    }
    return _Means(whitened, directions, correction)


def add_sums(parts: Sequence[Sums]) -> Sums:
    """The sums of all parts together."""
    total = parts[0]
    for part in parts[1:]:
        total = total.add_scaled(part, 1.0)
    return total


def _subtract(total: Sums, part: Sums) -> Sums:
    rest = total.add_scaled(part, -1.0)
    # what is left of subtracting equal numbers must be none
    counts = torch.where(rest.counts > 1e-6 * total.counts, rest.counts, torch.zeros_like(rest.counts))
    return Sums(rest.gram, rest.sums, counts, rest.constant)
