"""Classifiers over a model's features that take the place of its head: nearest class mean, Gaussian.

Each is rows of numbers, one a class: (M, d) means, or (M, d + 1) weights and a bias.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perennial.models.feature_maps.ball import RADIUS, unit_rows
from perennial.models.incremental import IncrementalModel

CLASS_MEANS = "class_means"
"""Name of the class means among a file's tensors, where the model was judged by the nearest of them."""
GAUSSIAN_HEAD = "gaussian_head"
"""The same of a Gaussian head over the model's features."""
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


class GaussianHead(nn.Module):
    """(B, ...) inputs -> (B, M) logits: linear discriminants of features of length 1/sqrt(2).

    rows: (M, d + 1), the weights of each class and its bias, as learning/analytic/solve.py finds them.
    """

    rows: Tensor

    def __init__(self, model: IncrementalModel, rows: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("rows", rows)

    def forward(self, x: Tensor) -> Tensor:
        features = unit_rows(self.model.features(x)) * RADIUS
        return features @ self.rows[:, :-1].T + self.rows[:, -1]


def never_predicted(bias: Tensor, rows: Tensor | None, width: int) -> list[int]:
    """Labels that are never predicted, because no record of them was learnt from.

    bias: (M,) of the head. rows: class means or a Gaussian head, as over_features takes them; None: the
    model's head answers. width: of the features.
    """
    if rows is not None and rows.shape[1] == width:
        found = ~rows.any(dim=1)
    else:
        found = (bias if rows is None else rows[:, -1]) <= NEVER / 2
    return found.nonzero().flatten().tolist()


def over_features(model: IncrementalModel, rows: Tensor) -> NearestMean | GaussianHead:
    """The classifier with these rows, (M, d) means or (M, d + 1) of a Gaussian head, in evaluation mode."""
    kind = NearestMean if rows.shape[1] == model.feature_width else GaussianHead
    return kind(model, rows.to(model.head.weight.device)).eval()
