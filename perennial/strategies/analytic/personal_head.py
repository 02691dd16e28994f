"""A hospital's own head in place of the federated one, and its answer to which head is right how often.

Its own head is made, measured and kept at the site. It is no part of a message and of the export, and outside
the federated model's epsilon.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perennial.client.policy import (
    check_answer,
    check_compared_heads,
    check_floor,
    find_withheld,
)
from perennial.client.release import leave
from perennial.client.secure_values import build_masked_reply, is_secure
from perennial.client.site import Site
from perennial.client.training_samples import choose
from perennial.config import charges
from perennial.config.secure_words import encode_integers
from perennial.data.samples import find_stored_type
from perennial.data.site import Part, SiteData
from perennial.foundation.errors import ProtocolError
from perennial.foundation.files import make_folder
from perennial.learning.analytic.personal import PersonalHead, fit_personal_head
from perennial.learning.analytic.solve import LinearHead
from perennial.learning.batches import TrainingSet
from perennial.learning.feature_bank import open_bank
from perennial.models.feature_maps.fixed import FixedFeatures
from perennial.models.incremental import IncrementalModel, complete_state
from perennial.models.saved import PERSONAL_MODEL, Inputs, save_model
from perennial.privacy.released import Released
from perennial.protocol.messages import (
    CompareHeadsReply,
    CompareHeadsRequest,
)
from perennial.protocol.secure_messages import MaskedReply
from perennial.protocol.tensors import hash_tensors


def keep_personal_head(
    data: SiteData, model: IncrementalModel, classes: tuple[str, ...], experiment: str, folder: Path
) -> dict[str, Any] | None:
    """Make a site's personal model in `folder` from the federated one; what it is worth on its own patients.

    classes: of the model, by label. experiment: as JSON. Validation records choose, test records judge;
    neither was in the sums. Returns None, and keeps no model, for records of fewer than two classes.
    """
    backbone = model.backbone
    assert isinstance(backbone, FixedFeatures)
    weight, bias = model.head.weight.detach().double(), model.head.bias.detach().double()
    used = (weight != 0).any(dim=0)
    federated = LinearHead(weight[:, used].cpu(), bias.cpu())
    parts: dict[Part, tuple[Tensor, Tensor]] = {
        part: _compute_features(backbone, data, part, len(classes), used) for part in PARTS
    }
    if len(torch.unique(parts["train"][1])) < 2:
        (folder / PERSONAL_MODEL).unlink(missing_ok=True)
        return None
    found = fit_personal_head(federated, parts["train"], parts["validation"])
    personal = torch.zeros_like(weight)
    personal[:, used] = found.personal.weight.to(weight)
    tensors = complete_state(model) | {
        "head.weight": personal.float(),
        "head.bias": found.personal.bias.float().to(weight.device),
    }
    inputs = Inputs(data.input_shape, find_stored_type(data.x), data.mean, data.std, data.columns, data.fill)
    make_folder(folder)
    save_model(folder / PERSONAL_MODEL, tensors, inputs, classes, experiment)
    return _compute_figures(federated, found, parts, classes)


PARTS: tuple[Part, ...] = ("train", "validation", "test")


def _compute_features(
    backbone: FixedFeatures, data: SiteData, part: Part, classes: int, used: Tensor
) -> tuple[Tensor, Tensor]:
    rows = data.find_task_indices(part, 0, classes)
    samples = TrainingSet(data.x[rows], data.y[rows], data.mean, data.std)
    parts = [each for each, _ in open_bank(backbone, samples, None).features(backbone, samples)]
    features = torch.cat(parts) if parts else torch.zeros(0, backbone.width)
    return features[:, used.cpu()].cpu(), data.y[rows].cpu()


def _compute_figures(
    federated: LinearHead,
    found: PersonalHead,
    parts: dict[Part, tuple[Tensor, Tensor]],
    classes: tuple[str, ...],
) -> dict[str, Any]:
    """Right answers of each head by class on the site's own test records."""
    features, labels = parts["test"]
    total = torch.bincount(labels, minlength=len(classes))
    heads = {"own": found.own, "federated": federated, "personal": found.personal}
    right: dict[str, list[int]] = {}
    for name, head in heads.items():
        hits = head.scores(features).argmax(dim=1) == labels
        right[name] = torch.bincount(labels[hits], minlength=len(classes)).tolist()
    return {
        "lambda": found.penalty if found.penalty < float("inf") else None,
        "train": len(parts["train"][1]),
        "validation": len(parts["validation"][1]),
        "total": total.tolist(),
        "right": right,
        "missing": [classes[label] for label in found.missing],
    }


def answer_compare_heads(site: Site, request: CompareHeadsRequest) -> CompareHeadsReply | MaskedReply:
    """Answer with each head's right answers on the site's validation samples of the classes seen so far."""
    policy = site.identity.policy
    check_answer(policy, "evaluate")
    check_compared_heads(policy, site.experiment)
    site.check_experiment(request)
    backbone, known = find_maps(site, request.features), request.num_classes
    heads = request.heads
    count = len(heads["bias"]) if "bias" in heads else 0
    found = {name: tuple(tensor.shape) for name, tensor in heads.items()}
    expected = {"weight": (count, known, backbone.width), "bias": (count, known)}
    if found != expected or not count:
        raise ProtocolError(f"CompareHeadsRequest: heads: found {found}, expected {expected}")
    if is_secure(site, request):
        return build_masked_reply(
            site,
            request,
            "compare_heads",
            hash_tensors(heads),
            lambda: (found := _count_right_answers(site, request, backbone, count)).alike(
                encode_integers(*found.value)
            ),
        )
    counts = _count_right_answers(site, request, backbone, count)
    correct, total = counts.value
    return leave(
        site.identity,
        request,
        CompareHeadsReply,
        correct=counts.alike(correct.flatten().tolist()),
        total=counts.alike(total.tolist()),
    )


def _count_right_answers(
    site: Site, request: CompareHeadsRequest, backbone: FixedFeatures, count: int
) -> Released[tuple[Tensor, Tensor]]:
    """(right answers of each head (K, C), samples (C,)) as they may leave, exact. count: K."""
    policy, known, heads = site.identity.policy, request.num_classes, request.heads
    mechanism = charges.price_clear_release(site.experiment, request.run, "evaluation")
    rows = choose(site, mechanism, lambda: site.data.find_task_indices("validation", 0, known))
    data = site.samples(rows)
    correct = torch.zeros(count, known, dtype=torch.int64)
    if len(data):
        weight, bias = (heads[name].to(data.x.device) for name in ("weight", "bias"))
        for features, labels in open_bank(backbone, data, site.feature_folder).features(backbone, data):
            for head in range(count):
                hits = (features @ weight[head].T + bias[head]).argmax(dim=1) == labels
                correct[head] += torch.bincount(labels[hits], minlength=known).cpu()
    total = data.counts(known).cpu()
    stay = sorted(find_withheld(policy, "compare_heads", total.tolist(), *correct.tolist()))
    if len(stay) == known:
        check_floor(policy, "compare_heads", 0)
    correct[:, stay], total[stay] = 0, 0
    return Released((correct, total), mechanism)


def find_maps(site: Site, features: str) -> FixedFeatures:
    """This site's maps. Raises ProtocolError where they are not those of the request."""
    backbone = site.models.load_fixed_features()
    found = backbone.find_by_content(features)
    if found is None:
        raise ProtocolError(
            f"features: found {features:.12}, this site has {backbone.content:.12}; server and site need "
            "the same maps, weights and preprocessing"
        )
    return found
