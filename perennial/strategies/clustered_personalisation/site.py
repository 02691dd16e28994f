"""The site halves of personalisation: layers that stay at the site, and sparsity vectors.

Personal layers are trained here, kept on the site's disk, and never part of a message. FedPer (Arivazhagan et
al. 2019, arXiv 1912.00818).

A sparsity vector is a statistic of the site's data. Nothing is proven about what it gives away unless it has
noise; then one Gaussian release hides the replacement of one sample (FedPerC's authors leave this open).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, get_args

from torch import Tensor

from perennial.client.held_out import held_out_counts, own_class_means
from perennial.client.policy import check_answer, check_floor, check_sparsity
from perennial.client.release import leave
from perennial.client.site import Site
from perennial.client.training_samples import choose, training_indices
from perennial.config import charges
from perennial.config.evaluation import count_noise
from perennial.foundation.errors import DataError, ProtocolError, StateError
from perennial.learning.batches import EVALUATION_BATCH, TrainingSet
from perennial.learning.site_method import Answers, PlannedRun, Records, SiteMethod, TurnStart
from perennial.models.layers import with_rows
from perennial.models.sparsity import MODEL, VECTOR, Combine, SparsityPlan, zero_shares
from perennial.privacy.accountants import sparsity_l2_sensitivity
from perennial.privacy.noise import Noise, add_noise
from perennial.privacy.released import Public, Released
from perennial.protocol.messages import (
    PersonalModelReply,
    PersonalModelRequest,
    SparsityReply,
    SparsityRequest,
)
from perennial.protocol.tensors import Tensors, content_sha256

RECORD = "own-layers"
PERSONAL = "personal"
"""The key of a request's settings that names the layers that stay; rounds of a global model have none."""


def answer_personal_model(site: Site, request: PersonalModelRequest) -> PersonalModelReply:
    """Keep the site's personalised model on its disk; reply with its right answers if sites evaluate."""
    policy = site.identity.policy
    check_answer(policy, "train")
    site.check_experiment(request)
    previous = site.previous_model(request)
    records, names = site.state(request.run), request.personal or []
    arrays = with_own_layers(records, site.name, request.arrays, names, before_round=request.round + 1)
    model, _ = site.models.load(request.num_classes, arrays, previous)
    site.keep_own_model(model, own_class_means(site, request, model))
    experiment = site.experiment
    # noise that the server adds to sums is on no single site's counts
    on_sums_alone = experiment.privacy.mode == "client_central" and count_noise(experiment) is not None
    if not experiment.evaluation.federated or "evaluate" not in policy.answers or on_sums_alone:
        return leave(site.identity, request, PersonalModelReply)
    counts = held_out_counts(site, request, model)
    return leave(site.identity, request, PersonalModelReply, **counts.typed())


def with_own_layers(
    records: Records, site: str, arrays: Mapping[str, Tensor], names: Sequence[str], before_round: int
) -> Tensors:
    """arrays, with the site's own values for the named layers as they were before a round.

    A site without values of its own starts from those received; a classifier that has grown since keeps its
    own rows and takes the new ones from those received. Raises ProtocolError when a name is not in arrays,
    StateError when the kept layer is of another network.
    """
    unknown = sorted(set(names) - arrays.keys())
    if unknown:
        raise ProtocolError(f"personal: found {unknown[0]!r}, which is no tensor of the model received")
    record = records.get(RECORD, before_round)
    own = record[0] if record is not None else {}
    joined = Tensors(arrays)
    for name in names:
        if name in own:
            try:
                joined[name] = with_rows(own[name], arrays[name])
            except ValueError as error:
                raise StateError(f"own layer {name!r} of site {site!r}: {error}") from error
    return joined


class PersonalSite(SiteMethod):
    """The site half of FedPer: the named layers are the site's own, from one round to the next."""

    answers: ClassVar[Answers] = {PersonalModelRequest: answer_personal_model}

    def extra_requests(self, kind: str, number: int, plan: PlannedRun) -> int:
        often = plan.experiment.evaluation.every == "round"
        return int(kind == "personal_model" and (often or number in plan.last_rounds))

    def extra_questions(self, plan: PlannedRun) -> tuple[int, int]:
        numbers = range(1, plan.last_rounds[-1] + 1)
        asked = sum(self.extra_requests("personal_model", number, plan) for number in numbers)
        return (asked, asked) if plan.experiment.evaluation.federated else (0, 0)

    def begin(self, start: TurnStart) -> None:
        self.start = start
        self.stays = tuple(start.read_settings(PERSONAL, list[str]) or ())

    def receive(self, arrays: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        start = self.start
        if not self.stays:
            return arrays
        return with_own_layers(start.records, start.site, arrays, self.stays, start.request.round)

    def finish(self, trained: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> None:
        if self.stays:
            own = {name: trained[name] for name in self.stays}
            self.start.records.put(RECORD, self.start.request.round, own, {})
        for name in self.stays:
            update[name].zero_()

    def owns_model(self, records: Records, before: int) -> bool:
        return records.get(RECORD, before) is not None


def answer_sparsity(site: Site, request: SparsityRequest) -> SparsityReply:
    """The mean share of zeros of the channels asked for, over the samples that this task is trained on.

    With request.epsilon, Gaussian noise is added, and exemplars of earlier tasks are left out. The site's
    ledger is charged before the reply is made.
    Raises PolicyRefusal when the policy lets no such vector leave or the samples are too few, PrivacyError
    when the budget does not cover it.
    """
    policy, noised = site.identity.policy, request.epsilon is not None
    check_answer(policy, "sparsity")
    check_sparsity(policy, site.experiment, noised=noised)
    site.check_experiment(request)
    plan = _plan(request)
    previous = site.previous_model(request)
    indices, exemplars = training_indices(site, request, previous)
    if noised:
        # which exemplars are kept can hang on one sample, and then one sample would move more than its share
        indices = indices[: len(indices) - exemplars]
    check_floor(policy, "sparsity", len(indices))
    mechanism = charges.sparsity(site.experiment, request.run, request.epsilon, request.delta)
    chosen, samples = choose(site, mechanism, indices), len(indices)
    indices = chosen.rows
    model, _ = site.models.load(request.num_classes, request.arrays, previous)
    data = site.samples(indices)
    shares = zero_shares(model.eval(), _batches(data), plan.layers)
    # a mean over all, in which those left out count as nothing: how many these are must not scale the noise
    vector = plan.vector(shares) * (len(indices) / samples) if noised else plan.vector(shares)
    if noised:
        if len(indices) == 0:
            raise DataError("sparsity: no new sample of this task, and a noised vector takes no exemplars")
        mechanism = mechanism.within(sparsity_l2_sensitivity(len(vector), samples))
        add_noise(vector, mechanism.std, Noise())
        vector.clamp_(0.0, 1.0)
    return leave(
        site.identity,
        request,
        SparsityReply,
        extractor=Public(plan.fingerprint(content_sha256(request.arrays))),
        vector=Released(Tensors({VECTOR: vector.float()}), mechanism, chosen=chosen),
    )


def _plan(request: SparsityRequest) -> SparsityPlan:
    if request.network != MODEL:
        raise ProtocolError(f"SparsityRequest: network: found {request.network!r}, allowed {MODEL}")
    if request.combine not in get_args(Combine):
        raise ProtocolError(
            f"SparsityRequest: combine: found {request.combine!r}, allowed {', '.join(get_args(Combine))}"
        )
    if (request.epsilon is None) != (request.delta is None):
        raise ProtocolError("SparsityRequest: epsilon and delta: allowed both or neither")
    return SparsityPlan(tuple(request.channels), request.layers, request.combine)  # pyright: ignore[reportArgumentType]


def _batches(data: TrainingSet) -> Iterator[Tensor]:
    return (data.inputs(slice(i, i + EVALUATION_BATCH)) for i in range(0, len(data), EVALUATION_BATCH))


class ClusteredSite(PersonalSite):
    """The site half of FedPerC and PFA: own layers, and a sparsity vector where groups are found by them."""

    answers: ClassVar[Answers] = {**PersonalSite.answers, SparsityRequest: answer_sparsity}

    def extra_requests(self, kind: str, number: int, plan: PlannedRun) -> int:
        return 1 if kind == "sparsity" else super().extra_requests(kind, number, plan)
