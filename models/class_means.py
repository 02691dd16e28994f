"""Classifies by the nearest class mean instead of the head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perennial.models.incremental import IncrementalModel


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
