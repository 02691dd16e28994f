"""Images back from a gradient or update: what an unprotected reply gives away to whoever reads it.

The attacker knows the model and the release, infers the labels from the last layer, and searches for images
whose gradient points the same way. Direction is all that it needs, so an update of one SGD step serves as
well as the gradient.

Zhu et al. 2019 (arXiv 1906.08935); Zhao et al. 2020 (arXiv 2001.02610): labels; Geiping et al. 2020 (arXiv
2003.14053): cosine distance, total variation, signed Adam.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

LEARNING_RATE = 0.1


@dataclass(frozen=True)
class Inversion:
    """Images that were reconstructed from a gradient.

    images: (B, C, H, W) in [0, 1], the best of all restarts.
    labels: (B,).
    distance: objective reached.
    """

    images: Tensor
    labels: Tensor
    distance: float


def infer_labels(head_gradient: Tensor, count: int) -> Tensor:
    """Labels of a batch from the gradient of cross entropy in the classifier's weights.

    head_gradient: (M, d), for M classes and features that are not negative (after a ReLU, sigmoid or
    pooling): a row's sum is then negative for classes in the batch and positive for others. Returns (count,)
    int64, the most negative rows first: certain for one sample; of a batch, a class that occurs twice is
    found once.
    """
    order = head_gradient.sum(dim=1).argsort()
    return order[torch.arange(count) % len(order)]


SMOOTHNESS = 1e-4
"""Weight of total variation, which stands in for what natural images look like."""


def invert_gradient(
    model: nn.Module,
    gradient: Mapping[str, Tensor],
    shape: tuple[int, int, int],
    generator: torch.Generator,
    *,
    head: str = "head.weight",
    steps: int = 400,
) -> Inversion:
    """An image in [0, 1] whose gradient has the direction of the released one.

    model: the one that the release was computed from, taking images in [0, 1] and giving logits. gradient: by
    parameter name; of an update pass its negative. shape: (C, H, W). head: names the entry from which the
    label follows.
    """
    names = list(gradient)
    target = torch.cat([gradient[name].reshape(-1) for name in names])
    direction = target / target.norm().clamp_min(1e-12)
    labels = infer_labels(gradient[head], 1)
    weights = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    frozen = {name: value.detach() for name, value in model.named_buffers()}

    def compute_objective(images: Tensor) -> Tensor:
        value = nn.functional.cross_entropy(functional_call(model, weights | frozen, (images,)), labels)
        parts = torch.autograd.grad(value, [weights[name] for name in names], create_graph=True)
        guess = torch.cat([part.reshape(-1) for part in parts])
        cosine = guess @ direction / guess.norm().clamp_min(1e-12)
        return 1 - cosine + SMOOTHNESS * total_variation(images)

    images, distance = search_images(compute_objective, (1, *shape), generator, steps)
    return Inversion(images, labels, distance)


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels: small for natural images. images: (B, C, H, W)."""
    rows = (images[..., 1:, :] - images[..., :-1, :]).abs()
    columns = (images[..., :, 1:] - images[..., :, :-1]).abs()
    return rows.mean() + columns.mean()


def search_images(
    objective: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    generator: torch.Generator,
    steps: int,
) -> tuple[Tensor, float]:
    """Images in [0, 1] that minimise objective, from one random start, and the value reached.

    The sign of the gradient goes to Adam, because its size spans many orders over the search; the step falls
    along a cosine. Geiping et al. 2020 (arXiv 2003.14053), section 6.
    """
    images = torch.rand(shape, generator=generator, device=generator.device).requires_grad_()
    optimizer = torch.optim.Adam([images], lr=LEARNING_RATE)
    best, best_value = images.detach().clone(), math.inf
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * step / steps))
        value = objective(images)
        (images.grad,) = torch.autograd.grad(value, [images])
        if value.item() < best_value:
            best, best_value = images.detach().clone(), value.item()
        images.grad.sign_()
        optimizer.step()
        with torch.no_grad():
            images.clamp_(0, 1)
    return best, best_value


def measure_similarity(first: Tensor, second: Tensor) -> Tensor:
    """SSIM of each pair of images: 1 for equal ones, about 0 for unrelated ones.

    first, second: (N, C, H, W) float in [0, 1]. Returns (N,), the mean over channels and positions. The
    window is a Gaussian of 11 x 11 with standard deviation 1.5, cut to the largest odd size
    that fits smaller images.
    Raises ValueError when the shapes differ.

    Wang et al. 2004, "Image quality assessment: from error visibility to structural similarity", equation 13.
    """
    if first.shape != second.shape or first.dim() != 4:
        raise ValueError(
            f"images of shapes {tuple(first.shape)} and {tuple(second.shape)}; expected equal (N, C, H, W)"
        )
    channels, side = first.shape[1], min(11, *first.shape[2:])
    side -= (side + 1) % 2
    position = torch.arange(side, dtype=first.dtype, device=first.device) - side // 2
    line = torch.exp(-position.square() / (2 * 1.5**2))
    window = torch.outer(line, line) / line.sum().square()
    kernel = window.expand(channels, 1, side, side)

    def mean(images: Tensor) -> Tensor:
        return F.conv2d(images, kernel, groups=channels)

    mean_first, mean_second = mean(first), mean(second)
    variance_first = mean(first.square()) - mean_first.square()
    variance_second = mean(second.square()) - mean_second.square()
    covariance = mean(first * second) - mean_first * mean_second
    luminance, contrast = 0.01**2, 0.03**2
    similarity = ((2 * mean_first * mean_second + luminance) * (2 * covariance + contrast)) / (
        (mean_first.square() + mean_second.square() + luminance)
        * (variance_first + variance_second + contrast)
    )
    return similarity.mean(dim=(1, 2, 3))


# Scores are higher for likelier members. AUC describes the average case; the true positive rate at a low
# false positive rate describes what a careful attacker can be sure of.
#
# Yeom et al. 2018 (arXiv 1709.01604): loss threshold. Carlini et al. 2022 (arXiv 2112.03570): likelihood
# ratio, and why TPR at low FPR is the measure.


_FEWEST_FOR_A_CLASS = 8


@dataclass(frozen=True)
class AttackStrength:
    """How well an attack tells members from others.

    auc: 0.5 is guessing.
    tpr_at_1_percent_fpr: 0.01 is guessing; below 100 others no error is allowed.
    """

    auc: float
    tpr_at_1_percent_fpr: float


def measure_strength(members: Tensor, non_members: Tensor) -> AttackStrength:
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


def run_loss_threshold(member_losses: Tensor, non_member_losses: Tensor) -> AttackStrength:
    """The test that calls a sample with a small loss a member. Losses (n,) and (m,) of the attacked model."""
    return measure_strength(-member_losses, -non_member_losses)


def compute_logit_confidence(logits: Tensor, labels: Tensor) -> Tensor:
    """(n,) log(p / (1 - p)) of the true labels, nearly Gaussian over others. logits: (n, M), labels: (n,)."""
    chosen = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return chosen[:, 0] - others.logsumexp(dim=1)


def run_likelihood_ratio(
    members: tuple[Tensor, Tensor], non_members: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor]
) -> AttackStrength:
    """The one-sided likelihood-ratio test against Gaussians that held-out samples give for each class.

    Each argument: (logits (n, M), labels (n,)) of the attacked model. reference: held-out samples that were
    neither trained on nor scored; they stand where the original has shadow models trained without the sample.
    A class with fewer than 8 of them takes the Gaussian of all.
    """
    confidence, labels = compute_logit_confidence(*reference), reference[1]
    classes = reference[0].shape[1]
    mean, deviation = confidence.mean().repeat(classes), confidence.std().repeat(classes)
    for label in labels.unique():
        own = confidence[labels == label]
        if len(own) >= _FEWEST_FOR_A_CLASS:
            mean[label], deviation[label] = own.mean(), own.std()

    def score(logits: Tensor, labels: Tensor) -> Tensor:
        return (compute_logit_confidence(logits, labels) - mean[labels]) / deviation[labels].clamp_min(1e-6)

    return measure_strength(score(*members), score(*non_members))
