"""What a site tells of a model on the samples that it held out, and what of it stays here.

`held_out` is where every count of an evaluation leaves: the policy, the floor and the ledger are asked there
and nowhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from perennial.client.class_means import own_class_means
from perennial.client.floor import check_floor, withheld
from perennial.client.policy import check_answer, check_evaluation
from perennial.client.release import charge
from perennial.client.secure_values import is_secure, masked_reply
from perennial.client.site import Site
from perennial.config.secure_words import evaluation_words
from perennial.foundation.errors import ProtocolError
from perennial.learning.evaluation import by_class_means, count_correct, head_counts
from perennial.learning.evaluation_tables import MOST_CLASSES, EvaluationTables
from perennial.learning.scored import Scored, score
from perennial.models.incremental import IncrementalModel
from perennial.protocol.messages import EvaluateReply, EvaluateRequest, Stamp
from perennial.protocol.secure_messages import MaskedReply
from perennial.protocol.tensors import Tensors


@dataclass(frozen=True)
class HeldOutCounts:
    """Right answers and samples of each class.

    withheld: classes whose counts stay here, which are 0 in both lists; None if there are none.
    """

    correct: list[int]
    total: list[int]
    withheld: list[int] | None


@dataclass(frozen=True)
class ToldTables:
    """tables: without what the floor keeps here. uncalibrated: classes whose calibration samples it keeps."""

    tables: EvaluationTables
    uncalibrated: list[int]


def answer_evaluate(site: Site, request: EvaluateRequest) -> EvaluateReply | MaskedReply:
    """Count right answers on the site's test samples, or where it has none on its validation samples."""
    check_answer(site.identity.policy, "evaluate")
    site.check_experiment(request)
    previous = site.previous_model(request)
    model, _ = site.models.load(request.num_classes, request.arrays, previous)

    def measured() -> tuple[HeldOutCounts, ToldTables | None]:
        return held_out(site, request, model, with_tables=request.tables)

    if is_secure(site, request):
        return masked_reply(
            site, request, "evaluation", request.arrays, lambda: _words(site, request, *measured())
        )
    counts, told = measured()
    if told is None:
        return EvaluateReply(**request.stamp_fields, **vars(counts))
    return EvaluateReply(
        **request.stamp_fields,
        **vars(counts),
        tables=Tensors(counts=torch.from_numpy(told.tables.vector())),
        uncalibrated=told.uncalibrated or None,
    )


def held_out_counts(site: Site, request: Stamp, model: IncrementalModel) -> HeldOutCounts:
    """Right answers and samples alone; as held_out."""
    return held_out(site, request, model, with_tables=False)[0]


def held_out(
    site: Site, request: Stamp, model: IncrementalModel, *, with_tables: bool
) -> tuple[HeldOutCounts, ToldTables | None]:
    """Counts on the site's test samples, or else its validation samples, but for classes below the floor.

    The tables are those of the samples whose classes are told, and None where the site's policy does not
    answer measures. All of it leaves the site, so whether it may is checked here, and it is charged to the
    site's ledger. Raises PolicyRefusal when it may not, PrivacyError when the site has a budget.
    """
    policy = site.identity.policy
    check_evaluation(policy, site.experiment)
    model.eval()
    part = "test" if len(site.data.test) else "validation"
    rows = site.data.task_indices(part, 0, request.num_classes)
    means = _class_means(site, request, model)
    scored = None
    if with_tables and "measures" in policy.answers and request.num_classes <= MOST_CLASSES:
        scored = score(model, site.samples(rows), means, site.feature_folder)
        whole = scored.tables()
        correct, total = whole.correct, whole.total
    else:
        correct, total = _counts(site, model, rows, means, request.num_classes)
    stay = withheld(policy, "evaluate", total)
    if len(stay) == len(total):
        check_floor(policy, "evaluate", 0)
    told = None if scored is None else _tables(site, request, model, means, scored, rows, stay, part)
    charge(site, request.run, of_update=False)
    return _without(correct, total, stay), told


def _counts(
    site: Site, model: IncrementalModel, rows: Tensor, means: Tensor | None, classes: int
) -> tuple[list[int], list[int]]:
    data = site.samples(rows)
    if means is None:
        return head_counts(model, data, classes, site.feature_folder)
    return count_correct(by_class_means(model, means), data, classes)


def _without(correct: Sequence[int], total: Sequence[int], stay: set[int]) -> HeldOutCounts:
    return HeldOutCounts(
        [0 if label in stay else right for label, right in enumerate(correct)],
        [0 if label in stay else samples for label, samples in enumerate(total)],
        sorted(stay) or None,
    )


def _tables(
    site: Site,
    request: Stamp,
    model: IncrementalModel,
    means: Tensor | None,
    scored: Scored,
    rows: Tensor,
    stay: set[int],
    part: str,
) -> ToldTables:
    """The tables of the samples of told classes; of validation and calibration samples beside them."""
    told = ~np.isin(scored.label, sorted(stay))
    tables = scored.pick(told).tables()
    policy, classes = site.identity.policy, request.num_classes
    validation = site.data.task_indices("validation", 0, classes)
    if part == "test" and len(validation) >= max(1, policy.min_samples):
        fitted = score(model, site.samples(validation), means, site.feature_folder)
        tables = replace(
            tables,
            likelihood=fitted.likelihood.sum(axis=0),
            validation=np.array([len(fitted)], dtype=np.int64),
        )
    calibration = site.data.one_of_each_patient(site.data.task_indices("calibration", 0, classes))
    uncalibrated: list[int] = []
    if len(calibration):
        own = score(model, site.samples(calibration), means, site.feature_folder).own_scores()
        uncalibrated = sorted(withheld(policy, "evaluate", own.sum(axis=1).tolist()))
        own[uncalibrated] = 0
        tables = replace(tables, calibration=own)
    return ToldTables(tables, uncalibrated)


def _words(
    site: Site, request: EvaluateRequest, counts: HeldOutCounts, told: ToldTables | None
) -> np.ndarray:
    """Words of a site's counts; what it withholds counts as nothing in the sum.

    Every site sends as many words, so that a sum does not tell who keeps its tables to itself.
    """
    if not request.tables or request.num_classes > MOST_CLASSES:
        return evaluation_words(counts.correct, counts.total)
    tables = EvaluationTables.empty(request.num_classes) if told is None else told.tables
    suppressed = told is not None and bool(counts.withheld or told.uncalibrated)
    beside = [*tables.vector().tolist(), int(told is not None), int(suppressed)]
    return evaluation_words(counts.correct, counts.total, beside)


def _class_means(site: Site, request: Stamp, model: IncrementalModel) -> Tensor | None:
    sent = request.class_means if isinstance(request, EvaluateRequest) else None
    return own_class_means(site, request, model) if sent is None else _sent_means(model, sent)


def _sent_means(model: IncrementalModel, tensors: Tensors) -> Tensor:
    expected = (model.num_classes, model.feature_width)
    if set(tensors) != {"means"} or tuple(tensors["means"].shape) != expected:
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        raise ProtocolError(f"EvaluateRequest: class_means: found {found}, expected means {expected}")
    return tensors["means"]
