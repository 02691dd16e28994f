"""A site's part of a closed-form classifier: sums over its samples' fixed features, and class counts.

The maps are the same at every site and nothing here trains. So a site answers once for each task, in
whichever round it is connected, and its answer does not depend on the round.
"""

import json
from dataclasses import asdict
from hashlib import sha256
from typing import ClassVar

import torch
from torch import Tensor

from perennial.client.learnt import note_learnt
from perennial.client.policy import (
    check_answer,
    check_floor,
    check_statistics,
    find_withheld,
)
from perennial.client.release import Paid, Typed, contain_errors, leave, pay, restore_paid
from perennial.client.secure_values import build_masked_reply, is_secure
from perennial.client.site import Site
from perennial.client.training_samples import choose
from perennial.config import charges
from perennial.config.secure_words import encode_integers, hash_statistics_subject, share_of_noise
from perennial.config.site import Release
from perennial.config.strategies import HEADS_OF_A_MAP, count_compared_heads, find_shrinkage
from perennial.foundation.errors import PolicyRefusal, PrivacyError, ProtocolError
from perennial.foundation.site_log import log
from perennial.learning.analytic.compact import compact_statistics
from perennial.learning.analytic.statistics import MOST_STEPS, Collector, Statistics, sum_weighted
from perennial.learning.feature_bank import open_bank
from perennial.learning.site_method import Answers, PlannedRun, SiteMethod
from perennial.models.feature_maps.fixed import FixedFeatures
from perennial.models.feature_maps.projection import RADIUS_SQUARED
from perennial.models.incremental import IncrementalModel
from perennial.privacy.noise import Noise
from perennial.privacy.noised_sums import add_noise_to_sums, compute_sensitivity
from perennial.privacy.released import Mechanism, Public, Released
from perennial.privacy.secure.keys import Words
from perennial.protocol.messages import (
    ClassCountsReply,
    ClassCountsRequest,
    CompareHeadsRequest,
    StatisticsReply,
    StatisticsRequest,
)
from perennial.protocol.secure_messages import MaskedReply
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import Tensors
from perennial.strategies.analytic.personal_head import answer_compare_heads, find_maps, keep_personal_head
from perennial.strategies.analytic.statements import read_statements, sign_sums

STATEMENT = "statement"
"""In the ledger's note of sums: before the hash of what the site signed of them."""


def answer_statistics(site: Site, request: StatisticsRequest) -> StatisticsReply | MaskedReply:
    """Answer with the sums of features of one task's training samples, masked under `secure`.

    Classes below the policy's floor are left out. Raises PolicyRefusal if sums may not leave, or all classes
    are below the floor; ProtocolError when the request does not fit the experiment.
    """
    policy = site.identity.policy
    check_answer(policy, "statistics")
    check_statistics(policy, site.experiment)
    site.check_experiment(request)
    backbone = find_maps(site, request.features)
    classes = _list_classes(site, request)
    weights = request.weights
    if weights is not None and site.experiment.privacy.enabled:
        raise PrivacyError(
            f"privacy.mode {site.experiment.privacy.mode}: StatisticsRequest: weights: found some; no bound "
            "on how much one sample moves weighted sums has been worked out"
        )
    if weights is not None and len(weights) != len(classes):
        raise ProtocolError(
            f"StatisticsRequest: weights: found {len(weights)}, expected {len(classes)}, one a class"
        )
    if not is_secure(site, request):
        return _reply(site, request, _prepare_sums(site, request, backbone, classes))
    about = hash_statistics_subject(request.features, request.class_order, request.of_task, weights)
    return build_masked_reply(
        site,
        request,
        "statistics",
        about,
        lambda: _encode_words(_prepare_sums(site, request, backbone, classes)),
        # other runs may divide the same classes into other tasks
        closes=[
            sha256(json.dumps([request.features, site.process.registry.classes[label]]).encode()).hexdigest()
            for label in classes
        ],
    )


def _encode_words(typed: Released[Tensors]) -> Released[Words]:
    """Words of a site's sums. Raises PolicyRefusal if as many sums as there can be leave the words' range.

    What is allowed follows from nothing in a request: a server that could move it would find how many samples
    there are.
    """
    from perennial.privacy.secure.roster import MOST_SITES

    sums = typed.value
    largest = max(int(tensor.abs().max()) for tensor in sums.values() if tensor.numel())
    if largest >= MOST_STEPS // MOST_SITES:
        raise PolicyRefusal(f"secure: {MOST_SITES} sums as large as this site's fit no 64-bit words")
    return typed.alike(encode_integers(sums["gram"], sums["sums"], sums["counts"]))


def _prepare_sums(
    site: Site, request: StatisticsRequest, backbone: FixedFeatures, classes: range
) -> Released[Tensors]:
    """The sums as they may leave."""
    if (sent := _find_sent(site, request)) is not None:
        return sent
    shown, counts = list[int](), list[int]()
    rows = torch.empty(0, dtype=torch.int64)
    # under noise, leaving out a class would reveal that it has few samples
    noised = site.experiment.privacy.enabled

    def find() -> Tensor:
        nonlocal shown, counts, rows
        counts = (
            count_training_samples(site, classes)
            if noised
            else _count_reported_samples(site, classes, "statistics")
        )
        if not noised and 0 < sum(counts) <= backbone.width and site.identity.deployed:
            log.warning(
                "statistics of %d samples with %d features leave without noise: they reveal the space in "
                "which these samples' features lie",
                sum(counts),
                backbone.width,
            )
        shown = [label for label, count in zip(classes, counts, strict=True) if count]
        rows = _find_training_rows(site, classes, shown)
        return rows

    mechanism = charges.price_sums(site.experiment, request.run, request.of_task)
    kept = choose(site, mechanism, find)
    sums = sum_features(site, backbone, classes, shown, request.weights, kept)
    asked = torch.tensor(counts) * torch.tensor(request.weights or 1)
    if not noised and not sums.counts.equal(asked):
        # some samples have no features: what is left of their class must reach the floor too
        kept = find_summed_rows(site, backbone, classes)
        check_floor(site.identity.policy, "statistics", len(kept))
        shown = site.data.y[kept].unique().tolist()
        rows = _find_training_rows(site, classes, shown)
        sums = sum_features(site, backbone, classes, shown, request.weights, kept)
    told = _release_sums(site, request, sums, mechanism)
    note_learnt(site, request, rows, request.of_task)
    return told


def _reply(site: Site, request: StatisticsRequest, typed: Released[Tensors]) -> StatisticsReply:
    fields: dict[str, Typed] = {"of_task": Public(request.of_task), "features": Public(request.features)}
    if site.experiment.privacy.enabled:
        return leave(site.identity, request, StatisticsReply, **fields, statistics=typed)
    tensors = typed.value
    sums = Statistics(tensors["gram"], tensors["sums"], tensors["counts"], _list_classes(site, request))
    fields["statistics"] = typed.alike(Tensors(compact_statistics(sums)))
    if request.signers is not None:
        signed = read_statements(site.state(request.run).folder)[request.of_task][-1]
        fields["statement"] = typed.alike(json.dumps(asdict(signed)))
    return leave(site.identity, request, StatisticsReply, **fields)


def _release_sums(
    site: Site, request: StatisticsRequest, sums: Statistics, mechanism: Mechanism
) -> Released[Tensors]:
    """The sums as they may leave. Noise is added once: the same bytes are sent when asked again."""
    privacy = site.experiment.privacy
    clear = Tensors(gram=sums.gram, sums=sums.sums, counts=sums.counts)
    if not privacy.enabled:
        signed = sign_sums(site, request, sums.sha256)
        if signed is not None:
            mechanism = mechanism.add_note(f"{STATEMENT} {signed.sha256}")
        return Released(clear, mechanism)
    assert privacy.noise_multiplier is not None
    state, name = site.state(request.run), f"statistics-{request.of_task}"
    multiplier = share_of_noise(site.experiment, privacy.noise_multiplier)
    moved = compute_sensitivity(sums.sums.shape[1], privacy.blocks)
    mechanism = mechanism.within(moved)
    mechanism.require(privacy.noise_multiplier * moved)
    gram, rows, counts = add_noise_to_sums(
        sums.gram,
        sums.sums,
        sums.counts,
        multiplier,
        Noise(),
        blocks=privacy.blocks,
        radius_squared=RADIUS_SQUARED,
    )
    noised = Released(Tensors(gram=gram, sums=rows, counts=counts), mechanism)
    paid = pay(site.identity, noised)
    state.put(name, 0, paid.value, {"features": request.features})
    return paid


def _find_sent(site: Site, request: StatisticsRequest) -> Paid[Tensors] | None:
    """What left with noise when this was asked for before; None where nothing did."""
    if not site.experiment.privacy.enabled:
        return None
    kept = site.state(request.run).get(f"statistics-{request.of_task}", before=1)
    return None if kept is None else restore_paid(Tensors(kept[0]))


def sum_features(
    site: Site,
    backbone: FixedFeatures,
    classes: range,
    shown: list[int],
    weights: list[int] | None,
    rows: Tensor,
) -> Statistics:
    """Exact sums of features, weighted by class if weights are given.

    Without weights: over the samples at rows. With weights, one for each of classes: over all training
    samples of the classes in `shown`.
    """
    if weights is None:
        return collect_sums(site, backbone, classes, rows)
    parts = (
        (
            collect_sums(
                site, backbone, range(label, label + 1), _find_training_rows(site, classes, [label])
            ),
            weights[label - classes.start],
        )
        for label in shown
    )
    return sum_weighted(parts, backbone.width + 1, classes)


def _find_training_rows(site: Site, classes: range, shown: list[int]) -> Tensor:
    indices = site.data.find_task_indices("train", classes.start, classes.stop)
    return indices[torch.isin(site.data.y[indices], torch.tensor(shown, dtype=torch.int64))]


def find_summed_rows(site: Site, backbone: FixedFeatures, classes: range) -> Tensor:
    """Indices of the training samples that are in this site's sums of these classes, if there is no noise.

    Samples without features are not; a class of which too few are left for the policy's floor stays.
    """
    policy, counts = site.identity.policy, count_training_samples(site, classes)
    stay = find_withheld(policy, "statistics", counts)
    shown = [label for place, label in enumerate(classes) if place not in stay]
    rows = _find_training_rows(site, classes, shown)
    data = site.samples(rows)
    if len(rows):
        found = open_bank(backbone, data, site.feature_folder).features(backbone, data)
        rows = rows[torch.cat([_have_features(features) for features, _ in found]).cpu()]
    left = torch.bincount(site.data.y[rows] - classes.start, minlength=len(classes)).tolist()
    counts = [count if place in stay else left[place] for place, count in enumerate(counts)]
    stay |= find_withheld(policy, "statistics", counts)
    shown = [label for place, label in enumerate(classes) if place not in stay]
    return rows[torch.isin(site.data.y[rows], torch.tensor(shown, dtype=torch.int64))]


def _have_features(features: Tensor) -> Tensor:
    """(n,) bool: whether a sample's features, a row of (n, d), are finite and not all 0."""
    return features.any(dim=1) & features.isfinite().all(dim=1)


def collect_sums(site: Site, backbone: FixedFeatures, classes: range, rows: Tensor) -> Statistics:
    """Exact sums of features over the samples at rows, all of which are of these classes.

    A constant is appended to the features unless noise will be added. Samples whose features are all 0, or
    not all finite, are left out: a refusal would tell of one of them without a charge.
    """
    data, constant = site.samples(rows), not site.experiment.privacy.enabled
    collector = Collector(backbone.width, classes, constant=constant, device=data.x.device)
    if len(data):
        empty = 0
        for features, labels in open_bank(backbone, data, site.feature_folder).features(backbone, data):
            told = _have_features(features)
            empty += int((~told).sum())
            collector.add(features[told], labels[told])
        if empty:
            log.warning("%d samples have no features, or no finite ones, and are left out of the sums", empty)
    return collector.finish()


def _count_reported_samples(site: Site, classes: range, release: Release) -> list[int]:
    """Training samples of each class, 0 for those that the policy keeps back.

    A class's sum over one sample is that sample's features.
    """
    counts = count_training_samples(site, classes)
    stay = find_withheld(site.identity.policy, release, counts)
    if len(stay) == len(classes):
        check_floor(site.identity.policy, release, 0)
    return [0 if place in stay else count for place, count in enumerate(counts)]


def count_training_samples(site: Site, classes: range) -> list[int]:
    """Number of this site's training samples of each of these classes, in their order."""
    indices = site.data.find_task_indices("train", classes.start, classes.stop)
    return torch.bincount(site.data.y[indices] - classes.start, minlength=len(classes)).tolist()


def answer_class_counts(site: Site, request: ClassCountsRequest) -> ClassCountsReply:
    """The number of training samples of each class of one task. Errors as answer_statistics."""
    policy = site.identity.policy
    check_answer(policy, "statistics")
    check_statistics(policy, site.experiment)
    site.check_experiment(request)
    if site.experiment.secure is not None:
        raise ProtocolError("ClassCountsRequest: this experiment has `secure`; counts leave in masked sums")
    if site.experiment.privacy.enabled:
        raise PrivacyError(f"privacy.mode {site.experiment.privacy.mode}: class counts leave without noise")
    counts = _count_reported_samples(site, _list_classes(site, request), "class_counts")
    mechanism = charges.price_clear_release(site.experiment, request.run, "class_counts")
    return leave(
        site.identity,
        request,
        ClassCountsReply,
        of_task=Public(request.of_task),
        counts=Released(counts, mechanism),
    )


def _list_classes(site: Site, request: StatisticsRequest | ClassCountsRequest) -> range:
    if request.of_task > request.task:
        raise ProtocolError(
            f"{type(request).__name__}: of_task: found {request.of_task}, allowed 1 to {request.task}"
        )
    return site.process.registry.schedule.list_classes(request.of_task)


class SumsSite(SiteMethod):
    """The site half: sums in place of training, compared heads, and a head of the site's own."""

    answers: ClassVar[Answers] = {
        StatisticsRequest: answer_statistics,
        ClassCountsRequest: answer_class_counts,
        CompareHeadsRequest: answer_compare_heads,
    }

    def extra_requests(self, kind: str, number: int, plan: PlannedRun) -> int:
        maps = sum(map(len, plan.experiment.model.choices))  # compared before sums of the chosen are asked
        match kind:
            case "statistics" | "class_counts":
                if kind == "class_counts" and not self._balanced:
                    return 0
                # of this task, and of earlier ones that the site was away for
                return 1 + sum(number > last for last in plan.last_rounds) + maps
            case "compare_heads":
                return int(find_shrinkage(self.keys) == "validation") + maps
            case _:
                return 0

    def extra_questions(self, plan: PlannedRun) -> tuple[int, int]:
        rounds, maps = plan.last_rounds[-1], sum(map(len, plan.experiment.model.choices))
        asked = sum(self.extra_requests("compare_heads", number, plan) for number in range(1, rounds + 1))
        return asked, count_compared_heads(self.keys) * rounds + HEADS_OF_A_MAP * maps

    def check(self, request: Stamp, plan: PlannedRun) -> None:
        """Check compared heads and weights. Raises PolicyRefusal if the experiment has others."""
        if isinstance(request, CompareHeadsRequest) and request.models > (
            most := count_compared_heads(self.keys)
        ):
            raise PolicyRefusal(
                f"heads: found {request.models}, the approved experiment compares {most} at most"
            )
        if isinstance(request, StatisticsRequest) and (request.weights is not None) != self._balanced:
            raise PolicyRefusal("weights: the approved experiment has them with head balanced_ridge alone")

    def sees_model(self, site: Site, model: IncrementalModel) -> None:
        classes = tuple(site.process.registry.classes[: model.num_classes])
        told = site.experiment.model_dump_json()
        with contain_errors("the site's own head"):
            keep_personal_head(site.data, model, classes, told, site.identity.state_dir)

    @property
    def _balanced(self) -> bool:
        return (self.keys.get("head") or "gaussian") == "balanced_ridge"
