"""Counts a model's right answers on the samples that a site holds out from training.

In the clear, they are exact, and a class with too few right or too few wrong answers for the policy's floor
stays. Under a protection they have noise, which the experiment states and the ledger is charged for, and the
floor is asked of the noised counts: which exact count is small must not show.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from perennial.client.policy import check_evaluation, check_floor, find_withheld
from perennial.client.release import Typed, pay
from perennial.client.site import Site
from perennial.client.training_samples import choose, find_exemplar_indices
from perennial.config import charges
from perennial.config.evaluation import count_noise
from perennial.foundation.errors import ConfigError
from perennial.learning.batches import TrainingSet
from perennial.learning.evaluation import (
    build_mean_classifier,
    compute_unit_features,
    count_correct,
    count_head_correct,
)
from perennial.learning.scored import Scored
from perennial.models.incremental import IncrementalModel
from perennial.privacy.discrete_gaussian import Integers
from perennial.privacy.noise import Noise
from perennial.privacy.noised_counts import (
    STEPS,
    CountNoise,
    join_cells,
    round_to_samples,
    round_towards_zero,
)
from perennial.privacy.released import Mechanism, Released
from perennial.privacy.secure.keys import Words
from perennial.protocol.messages import EvaluateRequest
from perennial.protocol.stamp import Stamp


@torch.no_grad()
def own_class_means(site: Site, request: Stamp, model: IncrementalModel) -> Tensor | None:
    """(M, d) unit means of the site's own exemplars after the request's round.

    A class without exemplars has a row of zeros. Returns None if the experiment classifies by the head, or if
    the site has no exemplar at all.
    """
    if site.experiment.learner.classifier != "nearest_mean":
        return None
    kept = find_exemplar_indices(site, request, request.round + 1, site.find_task_range(request).stop)
    if not len(kept):
        return None
    exemplars = site.samples(kept)
    sums = torch.zeros(model.num_classes, model.feature_width, device=exemplars.y.device)
    sums.index_add_(0, exemplars.y, compute_unit_features(model, exemplars))
    return F.normalize(sums, dim=1)


@dataclass(frozen=True)
class HeldOutCounts:
    """Right answers and samples of each class.

    withheld: classes whose counts stay here, which are 0 in both lists; None if there are none.
    released: what they follow from: paid for under noise, and otherwise the counts as they are.
    """

    correct: list[int]
    total: list[int]
    withheld: list[int] | None
    released: Released[Any]

    def build_fields(self) -> dict[str, Typed]:
        """The fields of a reply."""
        stay = {} if self.withheld is None else {"withheld": self.released.alike(self.withheld)}
        return {
            "correct": self.released.alike(self.correct),
            "total": self.released.alike(self.total),
            **stay,
        }


def count_held_out(
    site: Site, request: Stamp, model: IncrementalModel, scored: Scored | None = None
) -> HeldOutCounts:
    """Right answers and samples of each class that may leave; noised ones are charged for here.

    Counted are the site's test samples, or its validation samples if it has no test samples; with noise both
    together, because which part has samples would reveal something of them. scored: those samples under the
    model, if they were scored already. Raises PolicyRefusal when no count may leave, PrivacyError when the
    budget is too small.
    """
    check_evaluation(site.identity.policy, site.experiment)
    noise = count_noise(site.experiment)
    mechanism, rows = _choose_rows(site, request, noise)
    correct, total = (
        _count_exact(site, request, model, rows) if scored is None else (scored.correct, scored.total)
    )
    released: Released[Any] = Released((correct, total), mechanism)
    # noise covers each cell; exact counts must have enough right and enough wrong answers each
    asked, exact = total, [correct]
    if noise is not None:
        cells = _protect_counts(site, noise, mechanism, correct, total)
        # before anything is decided by them: to keep back all of them tells something too
        released = pay(site.identity, Released(cells, mechanism))
        trusts_server = site.experiment.privacy.mode == "client_central"
        correct, total = round_towards_zero(cells) if trusts_server else round_to_samples(cells)
        asked, exact = (asked, exact) if trusts_server else (total, [])
    stay = find_withheld(site.identity.policy, "evaluate", asked, *exact)
    if len(stay) == len(total):
        check_floor(site.identity.policy, "evaluate", 0)
    return HeldOutCounts(
        [0 if label in stay else right for label, right in enumerate(correct)],
        [0 if label in stay else samples for label, samples in enumerate(total)],
        sorted(stay) or None,
        released,
    )


def make_zero_counts(site: Site, request: EvaluateRequest) -> HeldOutCounts:
    """Zero counts, for a request that only fits a temperature, which leaves for the charge of counts.

    Raises as count_held_out() does.
    """
    check_evaluation(site.identity.policy, site.experiment)
    none = [0] * request.num_classes
    return HeldOutCounts(
        none, none, None, Released(none, charges.price_evaluation(site.experiment, request.run))
    )


def encode_noised_counts(
    site: Site, request: Stamp, model: IncrementalModel, noise: CountNoise
) -> Released[Words]:
    """Right and wrong answers of each class under `noise`, as words of a masked sum.

    Raises as count_held_out() does.
    """
    from perennial.config.secure_words import encode_cells

    check_evaluation(site.identity.policy, site.experiment)
    mechanism, rows = _choose_rows(site, request, noise)
    correct, total = _count_exact(site, request, model, rows)
    words = encode_cells(_protect_counts(site, noise, mechanism, correct, total))
    return Released(words, mechanism)


def _choose_rows(site: Site, request: Stamp, noise: CountNoise | None) -> tuple[Mechanism, Tensor]:
    """The mechanism of the counts, and the held-out samples that count."""
    mechanism = charges.price_evaluation(site.experiment, request.run)
    return mechanism, choose(site, mechanism, lambda: _find_rows(site, request, noise))


def _count_exact(
    site: Site, request: Stamp, model: IncrementalModel, rows: Tensor
) -> tuple[Sequence[int], Sequence[int]]:
    """Exact right answers and samples of each class, of the samples that count."""
    model.eval()
    data = site.samples(rows)
    with site.measuring():
        return _count_right(site, request, model, data)


def _count_right(
    site: Site, request: Stamp, model: IncrementalModel, data: TrainingSet
) -> tuple[Sequence[int], Sequence[int]]:
    """By the head, or by class means where the experiment has some."""
    if isinstance(request, EvaluateRequest) and request.validation:
        # exemplars of this task's classes are chosen when it ends, so that only the head can be judged
        return count_head_correct(model, data, request.num_classes, site.feature_folder)
    means = own_class_means(site, request, model)
    if means is None:
        return count_head_correct(model, data, request.num_classes, site.feature_folder)
    return count_correct(build_mean_classifier(model, means), data, request.num_classes)


def _find_rows(site: Site, request: Stamp, noise: CountNoise | None) -> Tensor:
    data, known = site.data, request.num_classes
    if noise is None:
        return find_exact_rows(site, request)
    rows = torch.cat([data.find_task_indices(part, 0, known) for part in ("test", "validation")])
    if site.experiment.privacy.hidden_unit != "patient":
        return rows
    if not data.patients:
        raise ConfigError("data.patient: missing; privacy.unit is patient, so the data must name them")
    return data.choose_one_per_patient(rows)


def find_exact_rows(site: Site, request: Stamp) -> Tensor:
    """Indices of the samples for exact counts: the test part, or validation if that is empty or asked for."""
    validation = isinstance(request, EvaluateRequest) and request.validation
    part = "test" if len(site.data.test) and not validation else "validation"
    return site.data.find_task_indices(part, 0, request.num_classes)


def _protect_counts(
    site: Site, noise: CountNoise, mechanism: Mechanism, correct: Sequence[int], total: Sequence[int]
) -> Integers:
    """(2 M,) cells in steps, as they may leave under the experiment's mode.

    The server adds the noise in client_central, and the sites together do in client_shared and sample_shared.
    """
    privacy, secure = site.experiment.privacy, site.experiment.secure
    mechanism.require(noise.std)
    source = Noise()
    cells = join_cells(correct, total)
    if privacy.mode == "sample":
        return cells * STEPS + noise.draw(len(cells), source)
    if privacy.mode == "sample_shared":
        assert secure is not None
        return cells * STEPS + noise.share(len(cells), secure.honest, source)
    cells = noise.shrink(cells)
    if privacy.mode == "client_local":
        return cells + noise.draw(len(cells), source)
    if privacy.mode == "client_shared":
        assert secure is not None
        return cells + noise.share(len(cells), secure.honest, source)
    return cells
