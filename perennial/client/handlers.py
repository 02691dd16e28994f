"""What a site does for each kind of request. Imported only when a request needs data and a model."""

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from perennial.client.held_out import (
    HeldOutCounts,
    count_held_out,
    encode_noised_counts,
    make_zero_counts,
    own_class_means,
)
from perennial.client.held_out_tables import (
    ReportedTables,
    build_temperature_tables,
    list_counts_beside,
    report_tables,
    score_held_out,
)
from perennial.client.policy import check_answer, check_evaluation, check_update, protects_records
from perennial.client.release import Typed, contain_errors, leave
from perennial.client.secure_values import build_masked_reply, is_secure, update_words
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
from perennial.protocol.tensors import Tensors, hash_tensors

if TYPE_CHECKING:
    from perennial.protocol.secure_messages import MaskedReply


def answer_train(site: Site, request: TrainRequest) -> "TrainReply | MaskedReply":
    """Train, and reply with the update: under `secure` as a part of a masked sum."""
    in_the_clear = site.experiment.secure is None and request.attempt is None
    if in_the_clear or not is_secure(site, request):
        return TrainingTurn.open(site, request).train_and_reply()
    return build_masked_reply(
        site,
        request,
        "update",
        hash_tensors(request.arrays),
        lambda: update_words(site, request, TrainingTurn.open(site, request).released()),
    )


def answer_finish_task(site: Site, request: FinishTaskRequest) -> FinishTaskReply:
    """Keep the finished task's model, and choose exemplars with it; repeating it changes nothing."""
    check_answer(site.identity.policy, "train")
    check_update(site.identity.policy, site.experiment)
    site.check_experiment(request)
    previous = site.load_previous_model(request)
    model, _ = site.models.load(request.num_classes, request.arrays, previous)
    finished = complete_state(model)
    sha256 = hash_tensors(finished)
    site.keep_model(request.run, sha256, finished)
    learner = site.experiment.learner
    if learner.memory is not None:
        new = site.find_task_range(request)
        choose_exemplars(site, site.open_exemplars(request.run), model, new, new.stop, version=request.round)
    if not SiteMethods.of(site.experiment).owns_model(site.state(request.run), request.round + 1):
        with contain_errors("the site's own model") if protects_records(site.identity) else nullcontext():
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
    previous = site.load_previous_model(request)
    model, _ = site.models.load(request.num_classes, request.arrays, previous)
    noise = count_noise(site.experiment)

    def report_counts() -> tuple[HeldOutCounts, ReportedTables | None]:
        if request.statistic == "temperature":
            return make_zero_counts(site, request), build_temperature_tables(site, request, model)
        scored = score_held_out(site, request, model)
        counts = count_held_out(site, request, model, scored)
        return counts, None if scored is None else report_tables(site, request, model, scored, counts)

    def encode_words() -> Released[Words]:
        if noise is not None:
            return encode_noised_counts(site, request, model, noise)
        from perennial.config.secure_words import encode_counts

        counts, tables = report_counts()
        beside = list_counts_beside(site, request, counts, tables)
        return counts.released.alike(encode_counts(counts.correct, counts.total, beside))

    if is_secure(site, request):
        reply = build_masked_reply(
            site, request, request.statistic, hash_tensors(request.arrays), encode_words
        )
    else:
        reply = leave(site.identity, request, EvaluateReply, **_build_fields(*report_counts()))
    if site.identity.deployed and not request.validation:
        for half in SiteMethods.of(site.experiment).methods:
            half.sees_model(site, model)
    return reply


def _build_fields(counts: HeldOutCounts, tables: ReportedTables | None) -> dict[str, Typed]:
    """The fields of a reply to EvaluateRequest."""
    typed = counts.build_fields()
    if tables is not None:
        # without noise: a paid value has no mechanism left, and would be refused here
        mechanisms = counts.released.mechanisms
        vector = Tensors(counts=torch.from_numpy(tables.tables.vector()))
        typed["tables"] = Released(vector, *mechanisms)
        if tables.uncalibrated:
            typed["uncalibrated"] = Released(tables.uncalibrated, *mechanisms)
    return typed
