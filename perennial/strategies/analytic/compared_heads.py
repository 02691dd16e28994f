"""A site's answer to which head is right how often, on its validation samples."""

import torch
from torch import Tensor

from perennial.client.policy import (
    check_answer,
    check_compared_heads,
    check_floor,
    withheld,
)
from perennial.client.release import leave
from perennial.client.secure_values import is_secure, masked_reply
from perennial.client.site import Site
from perennial.client.training_samples import choose
from perennial.config import charges
from perennial.config.secure_words import integer_words
from perennial.foundation.errors import ProtocolError
from perennial.learning.feature_bank import bank_of
from perennial.models.feature_maps.fixed import FixedFeatures
from perennial.privacy.released import Released
from perennial.protocol.messages import (
    CompareHeadsReply,
    CompareHeadsRequest,
)
from perennial.protocol.secure_messages import MaskedReply
from perennial.protocol.tensors import content_sha256


def answer_compare_heads(site: Site, request: CompareHeadsRequest) -> CompareHeadsReply | MaskedReply:
    """Answer with each head's right answers on the site's validation samples of the classes seen so far."""
    policy = site.identity.policy
    check_answer(policy, "evaluate")
    check_compared_heads(policy, site.experiment)
    site.check_experiment(request)
    backbone, known = maps_of(site, request.features), request.num_classes
    heads = request.heads
    count = len(heads["bias"]) if "bias" in heads else 0
    found = {name: tuple(tensor.shape) for name, tensor in heads.items()}
    expected = {"weight": (count, known, backbone.width), "bias": (count, known)}
    if found != expected or not count:
        raise ProtocolError(f"CompareHeadsRequest: heads: found {found}, expected {expected}")
    if is_secure(site, request):
        return masked_reply(
            site,
            request,
            "compare_heads",
            content_sha256(heads),
            lambda: (found := _right_answers(site, request, backbone, count)).alike(
                integer_words(*found.value)
            ),
        )
    counts = _right_answers(site, request, backbone, count)
    correct, total = counts.value
    return leave(
        site.identity,
        request,
        CompareHeadsReply,
        correct=counts.alike(correct.flatten().tolist()),
        total=counts.alike(total.tolist()),
    )


def _right_answers(
    site: Site, request: CompareHeadsRequest, backbone: FixedFeatures, count: int
) -> Released[tuple[Tensor, Tensor]]:
    """(right answers of each head (K, C), samples (C,)) as they may leave, exact. count: K."""
    policy, known, heads = site.identity.policy, request.num_classes, request.heads
    mechanism = charges.in_the_clear(site.experiment, request.run, "evaluation")
    rows = choose(site, mechanism, lambda: site.data.task_indices("validation", 0, known))
    data = site.samples(rows)
    correct = torch.zeros(count, known, dtype=torch.int64)
    if len(data):
        weight, bias = (heads[name].to(data.x.device) for name in ("weight", "bias"))
        for features, labels in bank_of(backbone, data, site.feature_folder).features(backbone, data):
            for head in range(count):
                hits = (features @ weight[head].T + bias[head]).argmax(dim=1) == labels
                correct[head] += torch.bincount(labels[hits], minlength=known).cpu()
    total = data.counts(known).cpu()
    stay = sorted(withheld(policy, "compare_heads", total.tolist(), *correct.tolist()))
    if len(stay) == known:
        check_floor(policy, "compare_heads", 0)
    correct[:, stay], total[stay] = 0, 0
    return Released((correct, total), mechanism)


def maps_of(site: Site, features: str) -> FixedFeatures:
    """This site's maps. Raises ProtocolError where they are not those of the request."""
    backbone = site.models.fixed_features()
    found = backbone.known_by(features)
    if found is None:
        raise ProtocolError(
            f"features: found {features:.12}, this site has {backbone.content:.12}; server and site need "
            "the same maps, weights and preprocessing"
        )
    return found
