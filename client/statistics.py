"""A site's share of a closed-form classifier: sums over its samples' fixed features, and counts beside them.

The maps are the same at every site and nothing here trains, so the site answers once a task, whenever it is
there; what it answers does not depend on when.
"""

import logging

import torch

from perennial.client.policy import check_answer, check_evaluation, check_samples, check_statistics
from perennial.client.release import charge, charge_entry
from perennial.client.site import Site
from perennial.foundation.errors import ConfigError, ProtocolError
from perennial.learning.analytic.statistics import Collector, Statistics, weighted
from perennial.learning.feature_bank import bank_of
from perennial.models.feature_maps.fixed import FixedFeatures
from perennial.privacy.entries import RECIPIENT, Entry
from perennial.protocol.messages import (
    ClassCountsReply,
    ClassCountsRequest,
    CompareHeadsReply,
    CompareHeadsRequest,
    Stamp,
    StatisticsReply,
    StatisticsRequest,
)
from perennial.protocol.tensors import Tensors

log = logging.getLogger("perennial.site")


def answer_statistics(site: Site, request: StatisticsRequest) -> StatisticsReply:
    """The sums of one task. Raises PolicyRefusal where they may not leave, or over too few samples."""
    policy = site.identity.policy
    check_answer(policy, "statistics")
    check_statistics(policy, site.experiment)
    site.check_stamp(request)
    backbone = _maps(site, request.features)
    classes = _classes(site, request)
    weights = request.weights
    if weights is not None and len(weights) != len(classes):
        raise ProtocolError(
            f"StatisticsRequest: weights: found {len(weights)}, expected {len(classes)}, one a class"
        )
    held = len(site.data.task_indices("train", classes.start, classes.stop))
    if held:
        check_samples(policy, held)
    if 0 < held <= backbone.width and site.identity.deployed:
        log.warning(
            "statistics of %d samples with %d features leave without noise: they tell the space that these "
            "samples' features lie in",
            held,
            backbone.width,
        )
    sums = summed(site, backbone, classes, weights)
    _charge(site, request, "statistics")
    tensors = Tensors(gram=sums.gram, sums=sums.sums, counts=sums.counts)
    return StatisticsReply(
        **request.stamp_fields, of_task=request.of_task, features=request.features, statistics=tensors
    )


def summed(site: Site, backbone: FixedFeatures, classes: range, weights: list[int] | None) -> Statistics:
    """Exact sums over the site's training samples of some classes; weights: of each class."""
    if weights is None:
        return _collected(site, backbone, classes)
    parts = (
        (_collected(site, backbone, range(label, label + 1)), weight)
        for label, weight in zip(classes, weights, strict=True)
    )
    return weighted(parts, backbone.width + 1, classes)


def _collected(site: Site, backbone: FixedFeatures, classes: range) -> Statistics:
    collector = Collector(backbone.width, classes)
    data = site.samples(site.data.task_indices("train", classes.start, classes.stop))
    if len(data):
        for features, labels in bank_of(backbone, data, site.feature_folder).features(backbone, data):
            collector.add(features, labels)
    return collector.finish()


def answer_class_counts(site: Site, request: ClassCountsRequest) -> ClassCountsReply:
    """The number of training samples of each class of one task. Errors as answer_statistics."""
    policy = site.identity.policy
    check_answer(policy, "statistics")
    check_statistics(policy, site.experiment)
    site.check_stamp(request)
    classes = _classes(site, request)
    indices = site.data.task_indices("train", classes.start, classes.stop)
    if len(indices):
        check_samples(policy, len(indices))
    counts = torch.bincount(site.data.y[indices] - classes.start, minlength=len(classes))
    _charge(site, request, "class_counts")
    return ClassCountsReply(**request.stamp_fields, of_task=request.of_task, counts=counts.tolist())


def answer_compare_heads(site: Site, request: CompareHeadsRequest) -> CompareHeadsReply:
    """Right answers of several heads on the site's validation samples of the classes seen so far."""
    policy = site.identity.policy
    check_answer(policy, "evaluate")
    check_evaluation(policy, site.experiment)
    site.check_stamp(request)
    backbone, known = _maps(site, request.features), request.num_classes
    heads = request.heads
    count = len(heads["bias"]) if "bias" in heads else 0
    found = {name: tuple(tensor.shape) for name, tensor in heads.items()}
    expected = {"weight": (count, known, backbone.width), "bias": (count, known)}
    if found != expected or not count:
        raise ProtocolError(f"CompareHeadsRequest: heads: found {found}, expected {expected}")
    data = site.samples(site.data.task_indices("validation", 0, known))
    correct = torch.zeros(count, known, dtype=torch.int64)
    if len(data):
        weight = heads["weight"].to(data.x.device)
        bias = heads["bias"].to(data.x.device)
        for features, labels in bank_of(backbone, data, site.feature_folder).features(backbone, data):
            for head in range(count):
                hits = (features @ weight[head].T + bias[head]).argmax(dim=1) == labels
                correct[head] += torch.bincount(labels[hits], minlength=known).cpu()
    charge(site, request.run, of_update=False)
    return CompareHeadsReply(
        **request.stamp_fields, correct=correct.flatten().tolist(), total=data.counts(known).tolist()
    )


def _maps(site: Site, features: str) -> FixedFeatures:
    """This site's maps. Raises ProtocolError where they are not those of the request."""
    backbone = site.models.fixed_features()
    if backbone.content != features:
        raise ProtocolError(
            f"features: found {features:.12}, this site has {backbone.content:.12}; server and site need "
            "the same maps, weights and preprocessing"
        )
    return backbone


def _classes(site: Site, request: StatisticsRequest | ClassCountsRequest) -> range:
    if request.of_task > request.task:
        raise ProtocolError(
            f"{type(request).__name__}: of_task: found {request.of_task}, allowed 1 to {request.task}"
        )
    return site.process.registry.schedule.classes_of(request.of_task)


def _charge(site: Site, request: Stamp, kind: str) -> None:
    """A simulated site without protection keeps no ledger: nothing leaves anybody."""
    if not site.identity.deployed:
        return
    if site.experiment.privacy.enabled:
        raise ConfigError(f"privacy.mode {site.experiment.privacy.mode}: no noise is added to {kind}")
    entry = Entry(
        run=request.run,
        experiment=request.experiment,
        recipient=RECIPIENT,
        kind=kind,
        unit="site",
        relation="replace",
        mechanism="unprotected",
    )
    charge_entry(site, entry)
