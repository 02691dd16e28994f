"""What a site does for each kind of request. Imported only when a request needs data and a model."""

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from perennial.client.held_out import (
    HeldOutCounts,
    held_out_counts,
    noised_words,
    own_class_means,
    uncounted,
)
from perennial.client.held_out_tables import (
    ReportedTables,
    counts_beside,
    fitted_tables,
    reported_tables,
    score_held_out,
)
from perennial.client.policy import check_answer, check_evaluation, check_update, protects_records
from perennial.client.release import Typed, leave, stays_here
from perennial.client.secure_values import is_secure, masked_reply, update_words
from perennial.client.site import Site
from perennial.client.training_samples import choose_exemplars
from perennial.client.training_turn import TrainingTurn
from perennial.config.evaluation import count_noise
from perennial.learning.site_method import SiteMethods
from perennial.models.incremental import complete_state
from perennial.privacy.released import Public, Released
from perennial.privacy.secure.keys import Words
from perennial.protocol.messages import (
    EvaluateReply,
    EvaluateRequest,
    FinishTaskReply,
    FinishTaskRequest,
    TrainReply,
    TrainRequest,
)
from perennial.protocol.tensors import Tensors, content_sha256

if TYPE_CHECKING:
    from perennial.protocol.secure_messages import MaskedReply


def answer_train(site: Site, request: TrainRequest) -> "TrainReply | MaskedReply":
    """Train, and reply with the update: under `secure` as a part of a masked sum."""
    in_the_clear = site.experiment.secure is None and request.attempt is None
    if in_the_clear or not is_secure(site, request):
        return TrainingTurn.open(site, request).taken()
    return masked_reply(
        site,
        request,
        "update",
        content_sha256(request.arrays),
        lambda: update_words(site, request, TrainingTurn.open(site, request).released()),
    )


def answer_finish_task(site: Site, request: FinishTaskRequest) -> FinishTaskReply:
    """Keep the finished task's model, and choose exemplars with it; repeating it changes nothing."""
    check_answer(site.identity.policy, "train")
    check_update(site.identity.policy, site.experiment)
    site.check_experiment(request)
    previous = site.previous_model(request)
    model, _ = site.models.load(request.num_classes, request.arrays, previous)
    finished = complete_state(model)
    sha256 = content_sha256(finished)
    site.keep_model(request.run, sha256, finished)
    learner = site.experiment.learner
    if learner.memory is not None:
        new = site.task_range(request)
        choose_exemplars(site, site.exemplars(request.run), model, new, new.stop, version=request.round)
    if not SiteMethods.of(site.experiment).owns_model(site.state(request.run), request.round + 1):
        with stays_here("the site's own model") if protects_records(site.identity) else nullcontext():
            means = own_class_means(site, request, model)
            if means is not None:
                site.keep_own_model(model, means)
    return leave(site.identity, request, FinishTaskReply, model=Public(sha256))


def answer_evaluate(site: Site, request: EvaluateRequest) -> "EvaluateReply | MaskedReply":
    """Count right answers on the samples that the site holds out from training."""
    check_answer(site.identity.policy, "evaluate")
    # what may not leave is not scored either: what scoring meets would show in the refusal
    check_evaluation(site.identity.policy, site.experiment)
    site.check_experiment(request)
    previous = site.previous_model(request)
    model, _ = site.models.load(request.num_classes, request.arrays, previous)
    noise = count_noise(site.experiment)

    def reported() -> tuple[HeldOutCounts, ReportedTables | None]:
        if request.statistic == "temperature":
            return uncounted(site, request), fitted_tables(site, request, model)
        scored = score_held_out(site, request, model)
        counts = held_out_counts(site, request, model, scored)
        return counts, None if scored is None else reported_tables(site, request, model, scored, counts)

    def words() -> Released[Words]:
        if noise is not None:
            return noised_words(site, request, model, noise)
        from perennial.config.secure_words import count_words

        counts, tables = reported()
        beside = counts_beside(site, request, counts, tables)
        return counts.released.alike(count_words(counts.correct, counts.total, beside))

    if is_secure(site, request):
        reply = masked_reply(site, request, request.statistic, content_sha256(request.arrays), words)
    else:
        reply = leave(site.identity, request, EvaluateReply, **_counted(*reported()))
    if site.identity.deployed and not request.validation:
        for half in SiteMethods.of(site.experiment).methods:
            half.sees_model(site, model)
    return reply


def _counted(counts: HeldOutCounts, tables: ReportedTables | None) -> dict[str, Typed]:
    """The fields of a reply to EvaluateRequest."""
    typed = counts.typed()
    if tables is not None:
        # without noise: a paid value has no mechanism left, and would be refused here
        mechanisms = counts.released.mechanisms
        vector = Tensors(counts=torch.from_numpy(tables.tables.vector()))
        typed["tables"] = Released(vector, *mechanisms)
        if tables.uncalibrated:
            typed["uncalibrated"] = Released(tables.uncalibrated, *mechanisms)
    return typed
