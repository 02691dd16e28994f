"""The terms of the local learner beside the loss over the labels: distillation and contrastive.

Each loss gives values of samples, (B,) or (B, M), whose mean is the loss of the batch: ordinary training
averages them, DP-SGD clips each sample's own (learning/objective.py). Natural logarithms.
Shapes: logits (B, M) over all M classes seen so far, labels (B,) int64, features (B, d).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from perennial.foundation.errors import ConfigError


def log_prior(counts: Tensor, scale: float, sign: int) -> Tensor:
    """The term that balanced softmax adds to the logits in training: scale * sign * log n_j for class j.

    counts: (M,) samples of each class in the site's own training set, exemplars included.
    Returns (M,) float32.
    A class that the site does not hold gets -inf, which leaves it out of the softmax, so that the site cannot
    push that class down (the limit of log n_j for n_j to 0; compare Li and Zhan 2021, FedRS).
    Raises ConfigError for sign -1 with an empty class, whose prior would be +inf.

    Ren et al. 2020 (arXiv 2007.10740), equation 4: added in training, raw logits in testing.
    """
    if sign < 0 and bool((counts == 0).any()):
        missing = (counts == 0).nonzero().flatten().tolist()
        raise ConfigError(
            f"learner.classification.sign: -1 needs samples of every class; this site has none of {missing}"
        )
    prior = counts.float().log() * (scale * sign)
    return torch.where(counts == 0, torch.full_like(prior, -torch.inf), prior)


def distillation(logits: Tensor, old_logits: Tensor, temperature: float) -> Tensor:
    """(B,) KL(previous model || this model) over the old classes alone, both renormalised there.

    The loss is T^2 times their mean.

    logits: (B, M), old_logits: (B, M_old). Raises ValueError where M_old > M.
    Hinton et al. 2015 (arXiv 1503.02531).
    """
    if old_logits.shape[1] > logits.shape[1]:
        raise ValueError(
            f"old logits: found {old_logits.shape[1]} classes, allowed {logits.shape[1]} at most"
        )
    ours = F.log_softmax(logits[:, : old_logits.shape[1]] / temperature, dim=1)
    theirs = F.log_softmax(old_logits / temperature, dim=1)
    return F.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim=1)


def feature_distillation(features: Tensor, target: Tensor) -> Tensor:
    """(B, d) squared distances of features from a target that gets no gradient; their mean is the loss.

    features, target: (B, d). Romero et al. 2015 (FitNets, arXiv 1412.6550), whose target is a teacher's.
    """
    return (features.float() - target.detach().float()).square()


def relation_distillation(logits: Tensor, labels: Tensor, old_logits: Tensor, temperature: float) -> Tensor:
    """(B,) KL(target || this model) over all classes; the loss is T^2 times their mean.

    The target is the one-hot label with the previous model's probabilities in the old columns,
    divided by its sum.
    logits: (B, M), old_logits: (B, M_old).

    Dong et al. 2022 (GLFC, arXiv 2203.14867), section 3.2, which writes the divergence the other way round;
    the target has zeros, so that would be infinite.
    """
    target = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
    target[:, : old_logits.shape[1]] = (old_logits / temperature).softmax(dim=1)
    target = target / target.sum(dim=1, keepdim=True)
    ours = F.log_softmax(logits / temperature, dim=1)
    return F.kl_div(ours, target, reduction="none").sum(dim=1)


def supervised_contrastive(features: Tensor, labels: Tensor, temperature: float, form: str = "out") -> Tensor:
    """Pulls features of one class together and pushes those of different classes apart.

    The mean over the samples that have another sample of their class in the batch; 0 with zero gradient if
    there is none. One number: the samples of a batch have no values of their own here.
    Features are scaled to unit length.
    form: "out" averages over positives outside the logarithm, "in" sums them inside.

    Khosla et al. 2020 (arXiv 2004.11362), equations 2 and 3; the denominator leaves the anchor out.
    """
    unit = F.normalize(features, dim=1)
    similarity = unit @ unit.T / temperature
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    log_probability = similarity - similarity.masked_fill(itself, -torch.inf).logsumexp(dim=1, keepdim=True)
    positive = (labels[:, None] == labels[None, :]) & ~itself
    count = positive.sum(dim=1)
    if form == "out":
        # filled, not multiplied: in a batch of one the row is infinite, and 0 times infinity is not 0
        each = -log_probability.masked_fill(~positive, 0.0).sum(dim=1) / count.clamp(min=1)
    else:
        each = -log_probability.masked_fill(~positive, -torch.inf).logsumexp(dim=1)
        each = torch.where(count > 0, each, torch.zeros_like(each))
    anchors = count > 0
    return (each * anchors).sum() / anchors.sum().clamp(min=1)
