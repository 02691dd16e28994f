"""A hospital's own head in place of the federated one: made, measured and kept at the site.

It is no part of a message and of the export, and outside the federated model's epsilon.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perennial.data.samples import stored_as
from perennial.data.site import Part, SiteData
from perennial.foundation.files import make_folder
from perennial.learning.analytic.personal import PersonalHead, fit_personal_head
from perennial.learning.analytic.solve import LinearHead
from perennial.learning.batches import TrainingSet
from perennial.learning.feature_bank import bank_of
from perennial.models.feature_maps.fixed import FixedFeatures
from perennial.models.incremental import IncrementalModel, complete_state
from perennial.models.saved import PERSONAL_MODEL, Inputs, save_model


def keep_personal_head(
    data: SiteData, model: IncrementalModel, classes: tuple[str, ...], experiment: str, folder: Path
) -> dict[str, Any] | None:
    """Make a site's personal model in `folder` from the federated one; what it is worth on its own patients.

    classes: of the model, by label. experiment: as JSON. Validation records choose, test records judge;
    neither was in the sums. Returns None, and keeps no model, where the site has records of fewer than two
    classes.
    """
    backbone = model.backbone
    assert isinstance(backbone, FixedFeatures)
    weight, bias = model.head.weight.detach().double(), model.head.bias.detach().double()
    used = (weight != 0).any(dim=0)
    federated = LinearHead(weight[:, used].cpu(), bias.cpu())
    parts: dict[Part, tuple[Tensor, Tensor]] = {
        part: _features(backbone, data, part, len(classes), used) for part in PARTS
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
    inputs = Inputs(data.input_shape, stored_as(data.x), data.mean, data.std, data.columns, data.fill)
    make_folder(folder)
    save_model(folder / PERSONAL_MODEL, tensors, inputs, classes, experiment)
    return _figures(federated, found, parts, classes)


PARTS: tuple[Part, ...] = ("train", "validation", "test")


def _features(
    backbone: FixedFeatures, data: SiteData, part: Part, classes: int, used: Tensor
) -> tuple[Tensor, Tensor]:
    rows = data.task_indices(part, 0, classes)
    samples = TrainingSet(data.x[rows], data.y[rows], data.mean, data.std)
    parts = [each for each, _ in bank_of(backbone, samples, None).features(backbone, samples)]
    features = torch.cat(parts) if parts else torch.zeros(0, backbone.width)
    return features[:, used.cpu()].cpu(), data.y[rows].cpu()


def _figures(
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
