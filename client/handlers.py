"""What a site does for each kind of request. Imported only when a request needs data and a model."""

import json
from collections.abc import Iterable

import torch
from torch import Tensor

from perennial.client.adversary import behaviour, mislabelled
from perennial.client.class_means import own_class_means, release_class_sums
from perennial.client.corrections import open_correction
from perennial.client.digests import withdrawal
from perennial.client.door import check_steps
from perennial.client.exemplars import ExemplarStore
from perennial.client.floor import check_floor
from perennial.client.held_out import HeldOutCounts, held_out_counts, noised_words
from perennial.client.held_out_tables import ToldTables, counts_beside, score_held_out, told_tables
from perennial.client.kept_model import keep_own_model
from perennial.client.learnt import not_learnt, note_learnt
from perennial.client.local_training import LocalTraining
from perennial.client.measurements import measured
from perennial.client.own_layers import has_own_layers, keep_own_layers, shared_update, with_own_layers
from perennial.client.policy import check_answer, check_update
from perennial.client.pretraining import indices_left_for_training
from perennial.client.prototypes import prototype_gradients
from perennial.client.release import check_reply, release_update
from perennial.client.ring_turn import segment_of, turn_of
from perennial.client.secure_update import update_words
from perennial.client.secure_values import is_secure, masked_reply
from perennial.client.site import Site
from perennial.config.evaluation import count_noise
from perennial.config.secure_words import class_sum_words, count_words
from perennial.foundation.errors import DataError
from perennial.learning.bayesian_estimate import NeighbourDistances
from perennial.learning.evaluation import unit_features
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

Previous = tuple[str, dict[str, Tensor]] | None


def answer_train(site: Site, request: TrainRequest) -> TrainReply | MaskedReply:
    """Train, and send the update: under `secure` as a part of a masked sum."""
    if not is_secure(site, request):
        return train_once(site, request)
    return masked_reply(
        site,
        request,
        "update",
        content_sha256(request.arrays),
        lambda: update_words(site, request, train_once(site, request)),
    )


def train_once(site: Site, request: TrainRequest) -> TrainReply:
    """Train on this task's data and the exemplars of earlier ones; release the protected update."""
    check_answer(site.identity.policy, "train")
    turn = turn_of(request)
    check_update(site.identity.policy, site.experiment, turn)
    site.check_experiment(request)
    previous = site.previous_model(request)
    indices, exemplars = training_indices(site, request, previous)
    if turn is not None:
        labels, seed = site.data.y[indices], site.experiment.seed
        indices, exemplars = segment_of(turn, indices, labels, exemplars, request, seed, site.name)
    policy = site.identity.policy
    check_floor(policy, "update", len(indices))
    if site.identity.deployed:
        check_steps(policy, site.experiment, len(indices))
    own = request.personal or []
    arrays = with_own_layers(site, request.run, request.arrays, own, before_round=request.round)
    model, flat = site.models.load(request.num_classes, arrays, previous)
    flat.hold(turn.frozen if turn is not None else ())
    correction = open_correction(site, request, flat)
    prototypes = prototype_gradients(site, request, model, indices[: len(indices) - exemplars])
    adversary = behaviour(site)
    data = site.samples(indices, exemplars=exemplars)
    if adversary == "label_flip":
        data = mislabelled(data, request.num_classes, site.experiment.seed, site.name)
    teacher = site.models.teacher(previous) if previous and site.experiment.learner.needs_previous else None
    neighbours = NeighbourDistances.of(
        site.experiment, site.identity.state_dir, site.name, request.run, request.round
    )
    result = LocalTraining(site, request, model, flat, data, teacher, correction, turn, neighbours).run()
    update = flat.views(result.update)
    if own:
        layers = flat.views(flat.vector)
        keep_own_layers(site, request.run, {name: layers[name] for name in own}, after_round=request.round)
        # what stays here must not take its share of the clip norm from what leaves
        for name in own:
            update[name].zero_()
    if adversary == "free_rider":
        result.update.zero_()
    if neighbours is not None:
        neighbours.keep()
    released = release_update(site, request, result, len(indices))
    flat.clear_held(result.update)
    correction.remember(result.update, result.steps)
    reply = TrainReply(
        **request.stamp_fields,
        update=shared_update(update, own),
        **vars(released),
        method=prototypes,
        metrics=json.dumps({**measured(site, request, model, indices, result), **withdrawal(site)}),
    )
    return check_reply(site, reply)


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
        _choose(site, site.exemplars(request.run), model, new, new.stop, version=request.round)
    sums = None
    if site.experiment.learner.means == "global":
        kept = site.exemplars(request.run).indices(before_round=request.round + 1)
        if is_secure(site, request):
            return masked_reply(
                site,
                request,
                "class_sums",
                content_sha256(request.arrays),
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
    """Count right answers on the samples that the site holds out from training."""
    check_answer(site.identity.policy, "evaluate")
    site.check_experiment(request)
    previous = site.previous_model(request)
    model, _ = site.models.load(request.num_classes, request.arrays, previous)
    noise = count_noise(site.experiment)

    def told() -> tuple[HeldOutCounts, ToldTables | None]:
        scored = score_held_out(site, request, model)
        counts = held_out_counts(site, request, model, scored)
        return counts, None if scored is None else told_tables(site, request, model, scored, counts)

    def words() -> Words:
        if noise is not None:
            return noised_words(site, request, model, noise)
        counts, tables = told()
        return count_words(counts.correct, counts.total, counts_beside(site, request, counts, tables))

    if is_secure(site, request):
        return masked_reply(site, request, "evaluation", content_sha256(request.arrays), words)
    counts, tables = told()
    if tables is None:
        return EvaluateReply(**request.stamp_fields, **vars(counts))
    return EvaluateReply(
        **request.stamp_fields,
        **vars(counts),
        tables=Tensors(counts=torch.from_numpy(tables.tables.vector())),
        uncalibrated=tables.uncalibrated or None,
    )


def training_indices(site: Site, stamp: Stamp, previous: Previous) -> tuple[Tensor, int]:
    """Places of the samples to train on in this task, new ones first, and how many of them are exemplars.

    In a run that goes on, new records of earlier classes count among the exemplars.

    Raises DataError when there is none. What is computed from them asks the floor, after its own cuts.
    """
    classes = site.task_range(stamp)
    new = indices_left_for_training(site, stamp, site.data.task_indices("train", classes.start, classes.stop))
    old = torch.empty(0, dtype=torch.int64)
    if site.experiment.learner.memory is not None and stamp.task > 1:
        store = site.exemplars(stamp.run)
        _catch_up(site, store, stamp, previous)
        old = torch.cat([store.indices(before_round=stamp.round), not_learnt(site, stamp)])
    note_learnt(site, stamp, new)
    indices = torch.cat([new, old])
    if len(indices) == 0:
        raise DataError("no samples to train on in this task: no new data and no exemplars")
    return indices, len(old)


def _catch_up(site: Site, store: ExemplarStore, request: Stamp, previous: Previous) -> None:
    """Choose the exemplars of tasks that ended while the site was away, with the previous task's model."""
    if previous is None:
        return
    held = set(site.data.y[store.indices(before_round=request.round)].tolist())
    known = site.task_range(request).start
    missed = [label for label in range(known) if label not in held]
    missed = [label for label in missed if len(site.data.task_indices("train", label, label + 1))]
    if missed:
        _choose(site, store, site.models.teacher(previous), missed, known, version=request.round - 1)


def _choose(
    site: Site, store: ExemplarStore, model: IncrementalModel, labels: Iterable[int], known: int, version: int
) -> None:
    """Keep exemplars of some classes, where `known` are known in all."""
    memory = site.experiment.learner.memory
    assert memory is not None
    quota = memory.quota(known, site.process.sites)
    members: dict[int, Tensor] = {}
    features: dict[int, Tensor] = {}
    for label in labels:
        indices = site.data.task_indices("train", label, label + 1)
        if len(indices):
            members[label] = indices
            if memory.selection != "random":
                features[label] = unit_features(model, site.samples(indices))
    store.choose(memory, quota, features, members, version)
