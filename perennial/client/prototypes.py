"""GLFC at a site: detects that new classes have come, and sends the gradient of one perturbed sample of each.

Dong et al. 2022 (GLFC, arXiv 2203.14867): task transition by entropy, prototype gradient communication.
Such a gradient gives its image back to whoever reads it: the server's use of it is that attack. No accountant
covers it, so every privacy mode refuses.

Symbols: n new samples, k classes among them.
"""

import torch
from pydantic import Field
from torch import Tensor

from perennial.client.floor import check_single_samples
from perennial.client.settings import part_of_settings
from perennial.client.site import Site
from perennial.foundation.block import FiniteBlock
from perennial.foundation.errors import DataError, PrivacyError
from perennial.foundation.streams import stream, torch_seed
from perennial.learning.batches import TrainingSet
from perennial.learning.evaluation import unit_features
from perennial.learning.exemplar_selection import nearest
from perennial.learning.frozen_outputs import outputs
from perennial.models.gradient_encoder import GradientEncoder
from perennial.models.incremental import IncrementalModel
from perennial.protocol.messages import TrainRequest
from perennial.protocol.tensors import Tensors

RECORD = "transition"


class PrototypeOrder(FiniteBlock):
    """`prototypes` of a request's settings."""

    noise: float = Field(ge=0, le=100)
    """Deviation of the noise on a prototype, in deviations of its class's pixels."""
    entropy_rise: float = Field(ge=0, le=100)
    """Nats from one round to the next that count as new classes."""


def prototype_gradients(
    site: Site, request: TrainRequest, model: IncrementalModel, new: Tensor
) -> Tensors | None:
    """Gradients of the encoder for k prototypes, by parameter name, stacked in random order.

    None if the request does not ask for them, or if the site sees no transition to a new task.
    model: as received.
    new: (n,) indices of this task's own samples.
    Raises PrivacyError with any protection on, PolicyRefusal unless the policy names prototypes, DataError if
    samples are no 8-bit images, ProtocolError naming what is wrong with the order.
    """
    order = part_of_settings(request, "prototypes", PrototypeOrder)
    if order is None:
        return None
    if site.experiment.privacy.enabled:
        raise PrivacyError(
            "prototypes: their gradients give back the samples, and no accountant covers them; allowed "
            "without privacy only"
        )
    check_single_samples(site.identity.policy, "prototypes")
    if len(new) == 0:
        return None
    data = site.samples(new)
    if data.x.dim() != 4 or data.x.dtype != torch.uint8:
        raise DataError("prototypes: need images of 8 bits; this site's samples are none")
    if not sees_transition(site, request, mean_entropy(model, data), order.entropy_rise):
        return None
    draw = torch.Generator().manual_seed(
        torch_seed(stream(site.experiment.seed, "prototypes", site.name, request.round))
    )
    encoder = GradientEncoder(site.models.input_shape, request.num_classes, site.experiment.seed)
    labels = data.y.unique().cpu()
    labels = labels[torch.randperm(len(labels), generator=draw)].tolist()
    features = unit_features(model, data)
    sent = [
        encoder.gradient(perturbed_prototype(data, features, label, order.noise, draw), label)
        for label in labels
    ]
    return Tensors({f"prototypes/{name}": torch.stack([one[name] for one in sent]) for name in sent[0]})


def perturbed_prototype(
    data: TrainingSet, features: Tensor, label: int, noise: float, draw: torch.Generator
) -> Tensor:
    """(C, H, W) in [0, 1]: the sample of a class whose feature is nearest to the class's mean, plus noise.

    noise: its standard deviation as a share of that of all pixels of the class's samples; 0: none.
    """
    members = (data.y == label).nonzero().flatten()
    images = data.x[members].cpu().float() / 255
    image = images[nearest(features[members], 1)[0]]
    spread = noise * float(images.std()) if noise else 0.0
    return (image + spread * torch.randn(image.shape, generator=draw)).clamp(0, 1)


@torch.no_grad()
def mean_entropy(model: IncrementalModel, data: TrainingSet) -> float:
    """Mean entropy (nats) of the model's predictions for these samples."""
    model.eval()
    log_probability = outputs(model, data).log_softmax(dim=1)
    return float(-(log_probability.exp() * log_probability).sum(dim=1).mean())


def sees_transition(site: Site, request: TrainRequest, entropy: float, rise: float) -> bool:
    """Whether the entropy is `rise` above that of the site's round before, or the site has no round before.

    Keeps the entropy for the next round.
    """
    state = site.state(request.run)
    before = state.get(RECORD, before=request.round)
    state.put(RECORD, request.round, {}, {"entropy": entropy})
    return before is None or entropy - before[1]["entropy"] >= rise
