"""A site's sparsity vector: computed on its training samples, noised as asked, charged to the ledger.

A vector is a statistic of the site's data. Nothing is proven about what it gives away unless it has noise;
then one Gaussian release hides the replacement of one sample (FedPerC's authors leave this open).
"""

from collections.abc import Iterator
from typing import get_args

from torch import Tensor

from perennial.client.floor import check_floor
from perennial.client.policy import check_answer, check_sparsity
from perennial.client.record_sets import choose
from perennial.client.release import leave
from perennial.client.site import Site
from perennial.client.training_samples import training_indices
from perennial.config import charges
from perennial.foundation.errors import DataError, ProtocolError
from perennial.learning.batches import EVALUATION_BATCH, TrainingSet
from perennial.models.sparsity import MODEL, VECTOR, Combine, SparsityPlan, zero_shares
from perennial.privacy.calibration import sparsity_l2_sensitivity
from perennial.privacy.noise import Noise, add_noise
from perennial.privacy.released import Public, Released
from perennial.protocol.messages import SparsityReply, SparsityRequest
from perennial.protocol.tensors import Tensors, content_sha256


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
