"""What the two reconstruction attacks share: a search for images by signed Adam, held smooth and in range."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

LEARNING_RATE = 0.1


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
