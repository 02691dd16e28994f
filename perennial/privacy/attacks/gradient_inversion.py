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


def invert_gradient(
    model: nn.Module,
    gradient: Mapping[str, Tensor],
    shape: tuple[int, int, int],
    generator: torch.Generator,
    *,
    labels: Tensor | None = None,
    head: str = "head.weight",
    restarts: int = 1,
    steps: int = 400,
    smoothness: float = 1e-4,
) -> Inversion:
    """Images in [0, 1] whose gradient has the direction of the released one.

    model: the one that the release was computed from, taking images in [0, 1] and giving logits. gradient: by
    parameter name; of an update pass its negative. shape: (C, H, W). labels: (B,), or None to infer that
    of one image from the entry `head`.
    smoothness: weight of total variation, which stands in for what natural images look like.
    """
    names = list(gradient)
    target = torch.cat([gradient[name].reshape(-1) for name in names])
    direction = target / target.norm().clamp_min(1e-12)
    if labels is None:
        labels = infer_labels(gradient[head], 1)
    weights = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    frozen = {name: value.detach() for name, value in model.named_buffers()}

    def objective(images: Tensor) -> Tensor:
        value = nn.functional.cross_entropy(functional_call(model, weights | frozen, (images,)), labels)
        parts = torch.autograd.grad(value, [weights[name] for name in names], create_graph=True)
        guess = torch.cat([part.reshape(-1) for part in parts])
        cosine = guess @ direction / guess.norm().clamp_min(1e-12)
        return 1 - cosine + smoothness * total_variation(images)

    found = [search_images(objective, (len(labels), *shape), generator, steps) for _ in range(restarts)]
    images, distance = min(found, key=lambda result: result[1])
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
