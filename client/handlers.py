"""What a site does for each kind of request. Imported only when a request needs data and a model."""

from dataclasses import dataclass

from torch import Tensor

from perennial.client.class_means import own_class_means, release_class_sums
from perennial.client.floor import check_floor, withheld
from perennial.client.kept_model import keep_own_model
from perennial.client.own_layers import has_own_layers
from perennial.client.policy import check_answer, check_evaluation
from perennial.client.release import charge
from perennial.client.secure_update import update_words
from perennial.client.secure_values import is_secure, masked_reply
from perennial.client.site import Site
from perennial.client.training_samples import choose_exemplars
from perennial.client.training_turn import TrainingTurn
from perennial.config.secure_words import class_sum_words, count_words
from perennial.foundation.errors import ProtocolError
from perennial.learning.evaluation import by_class_means, count_correct, head_counts
from perennial.models.incremental import IncrementalModel, complete_state
from perennial.privacy.secure.masks import Words
from perennial.protocol.messages import (
    EvaluateReply,
    EvaluateRequest,
    FinishTaskReply,
    FinishTaskRequest,
    Stamp,
    TrainReply,
    TrainRequest,
)
from perennial.protocol.secure_messages import MaskedReply
from perennial.protocol.tensors import Tensors, content_sha256


def answer_train(site: Site, request: TrainRequest) -> TrainReply | MaskedReply:
    """Train, and send the update: under `secure` as a part of a masked sum."""
    if not is_secure(site, request):
        return TrainingTurn.open(site, request).taken()
    return masked_reply(
        site,
        request,
        "update",
        request.arrays,
        lambda: update_words(site, request, TrainingTurn.open(site, request).taken()),
    )


def answer_finish_task(site: Site, request: FinishTaskRequest) -> FinishTaskReply | MaskedReply:
    """Keep the finished task's model, and choose exemplars with it. Doing it twice gives the same as once."""
    check_answer(site.identity.policy, "train")
    site.check_experiment(request)
    previous = site.previous_model(request)
    model, _ = site.models.load(request.num_classes, request.arrays, previous)
    finished = {name: tensor.detach().clone() for name, tensor in complete_state(model).items()}
    sha256 = content_sha256(finished)
    site.keep_model(request.run, sha256, finished)
    if site.experiment.learner.memory is not None:
        new = site.task_range(request)
        choose_exemplars(site, site.exemplars(request.run), model, new, new.stop, version=request.round)
    sums = None
    if site.experiment.learner.means == "global":
        kept = site.exemplars(request.run).indices(before_round=request.round + 1)
        if is_secure(site, request):
            return masked_reply(
                site,
                request,
                "class_sums",
                request.arrays,
                lambda: class_sum_words(release_class_sums(site, request, model, kept)),
                kept=sha256,
            )
        sums = release_class_sums(site, request, model, kept)
    elif not has_own_layers(site, request.run, before_round=request.round + 1):
        means = own_class_means(site, request, model)
        if means is not None:
            keep_own_model(site, model, means)
    return FinishTaskReply(**request.stamp_fields, model=sha256, class_sums=sums)


def answer_evaluate(site: Site, request: EvaluateRequest) -> EvaluateReply | MaskedReply:
    """Count right answers on the site's test samples, or where it has none on its validation samples."""
    check_answer(site.identity.policy, "evaluate")
    site.check_experiment(request)
    previous = site.previous_model(request)
    model, _ = site.models.load(request.num_classes, request.arrays, previous)
    if is_secure(site, request):
        return masked_reply(
            site,
            request,
            "evaluation",
            request.arrays,
            lambda: _count_words(held_out_counts(site, request, model)),
        )
    return EvaluateReply(**request.stamp_fields, **vars(held_out_counts(site, request, model)))


@dataclass(frozen=True)
class HeldOutCounts:
    """Right answers and samples of each class.

    withheld: classes whose counts stay here, which are 0 in both lists; None if there are none.
    """

    correct: list[int]
    total: list[int]
    withheld: list[int] | None


def held_out_counts(site: Site, request: Stamp, model: IncrementalModel) -> HeldOutCounts:
    """Counts on the site's test samples, or else its validation samples, but for classes below the floor.

    They leave the site, so whether they may is checked here, and they are charged to its ledger. Raises
    PolicyRefusal when they may not, PrivacyError when the site has a budget.
    """
    check_evaluation(site.identity.policy, site.experiment)
    model.eval()
    part = "test" if len(site.data.test) else "validation"
    data = site.samples(site.data.task_indices(part, 0, request.num_classes))
    sent = request.class_means if isinstance(request, EvaluateRequest) else None
    means = own_class_means(site, request, model) if sent is None else _means(model, sent)
    if means is None:
        correct, total = head_counts(model, data, request.num_classes, site.feature_folder)
    else:
        correct, total = count_correct(by_class_means(model, means), data, request.num_classes)
    policy = site.identity.policy
    stay = withheld(policy, "evaluate", total)
    if len(stay) == len(total):
        check_floor(policy, "evaluate", 0)
    charge(site, request.run, of_update=False)
    return HeldOutCounts(
        [0 if label in stay else right for label, right in enumerate(correct)],
        [0 if label in stay else samples for label, samples in enumerate(total)],
        sorted(stay) or None,
    )


def _count_words(counts: HeldOutCounts) -> Words:
    """Words of a site's counts; a class that it withholds counts as nothing in the sum."""
    return count_words(counts.correct, counts.total)


def _means(model: IncrementalModel, tensors: Tensors) -> Tensor:
    expected = (model.num_classes, model.feature_width)
    if set(tensors) != {"means"} or tuple(tensors["means"].shape) != expected:
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        raise ProtocolError(f"EvaluateRequest: class_means: found {found}, expected means {expected}")
    return tensors["means"]
