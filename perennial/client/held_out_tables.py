"""Tables of counts that a site reports beside its right answers: predicted classes and probabilities.

They leave exact or not at all: the site's policy must answer measures, and samples of a class whose counts
the floor keeps here are in none of them.
"""

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from perennial.client.held_out import HeldOutCounts, find_exact_rows, own_class_means
from perennial.client.policy import find_withheld
from perennial.client.site import Site
from perennial.config.evaluation import asks_for_tables, count_subgroups
from perennial.learning.evaluation_tables import MOST_CLASSES, EvaluationTables
from perennial.learning.scored import Scored, build_classifier, compute_likelihoods, score
from perennial.models.incremental import IncrementalModel
from perennial.protocol.messages import EvaluateRequest


@dataclass(frozen=True)
class ReportedTables:
    """Tables that may leave. uncalibrated: classes with fewer calibration samples than the floor."""

    tables: EvaluationTables
    uncalibrated: list[int]


def needs_tables(site: Site, request: EvaluateRequest) -> bool:
    """Whether tables are asked for, by the request and the experiment, with no more than MOST_CLASSES."""
    return request.tables and asks_for_tables(site.experiment) and request.num_classes <= MOST_CLASSES


def score_held_out(site: Site, request: EvaluateRequest, model: IncrementalModel) -> Scored | None:
    """The model's scores of the held-out samples (exact_rows); None if no table may leave this site."""
    if not needs_tables(site, request) or "measures" not in site.identity.policy.answers:
        return None
    return _score(site, request, model, find_exact_rows(site, request))


def report_tables(
    site: Site, request: EvaluateRequest, model: IncrementalModel, scored: Scored, counts: HeldOutCounts
) -> ReportedTables:
    """Tables of the held-out samples, and scores of the calibration samples, without classes below the floor.

    scored: from score_held_out(). counts: from count_held_out(), sent and charged together with the tables.
    """
    leaves = ~np.isin(scored.label, counts.withheld or [])
    policy, classes = site.identity.policy, request.num_classes
    kept = scored.pick(leaves)
    tables = kept.build_tables(
        None, _find_subgroups(site, request, kept, leaves), count_subgroups(site.experiment)
    )
    calibration = site.data.find_task_indices("calibration", 0, classes)
    uncalibrated: list[int] = []
    if len(calibration):
        if site.data.patients:
            calibration = site.data.choose_one_per_patient(calibration, "calibration")
        found = _score(site, request, model, calibration)
        uncalibrated = sorted(find_withheld(policy, "evaluate", found.total))
        tables = replace(tables, calibration=found.pick(~np.isin(found.label, uncalibrated)).scores())
    return ReportedTables(tables, uncalibrated)


def _find_subgroups(
    site: Site, request: EvaluateRequest, kept: Scored, leaves: np.ndarray
) -> np.ndarray | None:
    """(n,) subgroup of each sample that may leave; -1 too if the floor keeps its class and subgroup here."""
    if site.data.subgroup is None or not count_subgroups(site.experiment):
        return None
    found = site.data.subgroup[find_exact_rows(site, request).cpu().numpy()][leaves].copy()
    groups = count_subgroups(site.experiment)
    right = kept.label == kept.predicted
    for label in range(request.num_classes):
        own = kept.label == label
        # one cell more for the rest: what is missing from a class's total must not give a subgroup away
        cells, hits = (
            np.bincount(found[rows] + 1, minlength=groups + 1).tolist() for rows in (own, own & right)
        )
        for cell in find_withheld(site.identity.policy, "evaluate", cells, hits) if own.any() else ():
            found[own & (found == cell - 1)] = -1
    return found


def list_counts_beside(
    site: Site, request: EvaluateRequest, counts: HeldOutCounts, reported: ReportedTables | None
) -> list[int]:
    """Integers beside the counts of a masked sum: tables, 1 if there are any, 1 if a class is withheld.

    Returns [] if the request is for no tables. A site without tables (reported None) sends as many zeros, so
    that a sum does not tell which sites sent theirs.
    """
    if not needs_tables(site, request):
        return []
    tables = (
        EvaluationTables.empty(request.num_classes, count_subgroups(site.experiment))
        if reported is None
        else reported.tables
    )
    suppressed = reported is not None and bool(counts.withheld or reported.uncalibrated)
    return [*tables.vector().tolist(), int(reported is not None), int(suppressed)]


def build_temperature_tables(
    site: Site, request: EvaluateRequest, model: IncrementalModel
) -> ReportedTables | None:
    """Summed likelihoods of the validation samples at each temperature; None if no table may leave.

    They are 0 if the site has no test samples, or fewer validation samples than the policy's floor.
    """
    policy = site.identity.policy
    if not needs_tables(site, request) or "measures" not in policy.answers:
        return None
    rows, groups = find_exact_rows(site, request), count_subgroups(site.experiment)
    empty = EvaluationTables.empty(request.num_classes, groups)
    # without test samples the validation samples are those that are judged
    if not len(site.data.test) or len(rows) < max(1, policy.min_samples):
        return ReportedTables(empty, [])
    with site.measuring():
        classify, data = build_classifier(
            model, site.samples(rows), own_class_means(site, request, model), site.feature_folder
        )
        losses = compute_likelihoods(classify, data)
    found = replace(empty, likelihood=losses, validation=np.array([len(rows)], dtype=np.int64))
    return ReportedTables(found, [])


def _score(site: Site, request: EvaluateRequest, model: IncrementalModel, rows: Tensor) -> Scored:
    means = own_class_means(site, request, model)
    with site.measuring():
        samples, folder = site.samples(rows), site.feature_folder
        return score(model, samples, means, folder, temperature=request.temperature)
