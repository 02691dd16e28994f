"""The classifier over a model's features that takes the place of its head: the nearest class mean."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perennial.models.incremental import IncrementalModel

CLASS_MEANS = "class_means"
"""Name of the class means among a file's tensors, where the model was judged by the nearest of them."""
NEVER = -1e9
"""Bias of a class without samples: it is never predicted, and its probability is 0."""


def mean_similarity(features: Tensor, means: Tensor) -> Tensor:
    """Cosine similarity of each feature with each class mean, (B, M).

    features: (B, d).
    means: (M, d), rows of unit length, or zero for a class without exemplars. Such a class gets -inf, so it
    is never predicted.

    Rebuffi et al. 2017 (arXiv 1611.07725), algorithm 1.
    """
    cosine = F.normalize(features, dim=1) @ means.T
    return cosine.masked_fill(~means.any(dim=1), -torch.inf)


class NearestMean(nn.Module):
    """(B, ...) inputs -> (B, M) logits: minus the squared distance of unit features from the class means.

    Their softmax is the confidence of a prototypical network, Snell et al. 2017 (arXiv 1703.05175), equation
    2; as both vectors have unit length it is a cautious one. means: (M, d), rows of unit length or zero.
    """

    means: Tensor

    def __init__(self, model: IncrementalModel, means: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("means", means)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * mean_similarity(self.model.features(x), self.means) - 2


def list_never_predicted(bias: Tensor) -> list[int]:
    """Labels that are never predicted, because no record of them was learnt from. bias: (M,) of the head."""
    return (bias <= NEVER / 2).nonzero().flatten().tolist()


def build_nearest_mean(model: IncrementalModel, means: Tensor) -> NearestMean:
    """The classifier with these class means, (M, d), in evaluation mode."""
    return NearestMean(model, means.to(model.head.weight.device)).eval()
