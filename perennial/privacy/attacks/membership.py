"""Was this sample in the training set? Two tests that need no shadow models, and how strong each is.

Scores are higher for likelier members. AUC describes the average case; the true positive rate at a low false
positive rate describes what a careful attacker can be sure of.

Yeom et al. 2018 (arXiv 1709.01604): loss threshold. Carlini et al. 2022 (arXiv 2112.03570): likelihood ratio,
and why TPR at low FPR is the measure.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_FEWEST_FOR_A_CLASS = 8


@dataclass(frozen=True)
class AttackStrength:
    """How well an attack tells members from others.

    auc: 0.5 is guessing.
    tpr_at_1_percent_fpr: 0.01 is guessing; below 100 others no error is allowed.
    """

    auc: float
    tpr_at_1_percent_fpr: float


def strength(members: Tensor, non_members: Tensor) -> AttackStrength:
    """How well scores (n,) and (m,) tell members from non-members. Raises ValueError when one is empty."""
    from sklearn.metrics import auc, roc_curve

    if len(members) == 0 or len(non_members) == 0:
        raise ValueError("membership inference needs at least one member and one non-member")
    truth = torch.cat([torch.ones(len(members)), torch.zeros(len(non_members))])
    false_positive, true_positive, _ = roc_curve(
        truth.numpy(), torch.cat([members, non_members]).cpu().numpy()
    )
    allowed = true_positive[false_positive <= 0.01]
    return AttackStrength(float(auc(false_positive, true_positive)), float(allowed.max()))


def loss_threshold(member_losses: Tensor, non_member_losses: Tensor) -> AttackStrength:
    """The test that calls a sample with a small loss a member. Losses (n,) and (m,) of the attacked model."""
    return strength(-member_losses, -non_member_losses)


def logit_confidence(logits: Tensor, labels: Tensor) -> Tensor:
    """(n,) log(p / (1 - p)) of the true labels, nearly Gaussian over others. logits: (n, M), labels: (n,)."""
    chosen = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return chosen[:, 0] - others.logsumexp(dim=1)


def likelihood_ratio(
    members: tuple[Tensor, Tensor], non_members: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor]
) -> AttackStrength:
    """The one-sided likelihood-ratio test against Gaussians that held-out samples give for each class.

    Each argument: (logits (n, M), labels (n,)) of the attacked model. reference: held-out samples that were
    neither trained on nor scored; they stand where the original has shadow models trained without the sample.
    A class with fewer than 8 of them takes the Gaussian of all.
    """
    confidence, labels = logit_confidence(*reference), reference[1]
    classes = reference[0].shape[1]
    mean, deviation = confidence.mean().repeat(classes), confidence.std().repeat(classes)
    for label in labels.unique():
        own = confidence[labels == label]
        if len(own) >= _FEWEST_FOR_A_CLASS:
            mean[label], deviation[label] = own.mean(), own.std()

    def score(logits: Tensor, labels: Tensor) -> Tensor:
        return (logit_confidence(logits, labels) - mean[labels]) / deviation[labels].clamp_min(1e-6)

    return strength(score(*members), score(*non_members))
