"""Images back from a digest: what a stored mixture of features gives away to whoever knows the encoder."""

from collections.abc import Callable

import torch
from torch import Tensor

from perennial.privacy.attacks.gradient_inversion import search_images, total_variation


def reconstruct_digest(
    encoder: Callable[[Tensor], Tensor],
    digest: Tensor,
    shape: tuple[int, int, int],
    weights: Tensor,
    generator: torch.Generator,
    *,
    steps: int = 400,
    smoothness: float = 1e-3,
) -> Tensor:
    """Images in [0, 1] whose mixed features come closest to a digest: (S, C, H, W), S = len(weights).

    encoder: the public one, differentiable, from (S, C, H, W) to (S, ...). digest: (...), noised or not.
    shape: (C, H, W).
    weights: (S,), of the mixture, sum 1.
    With one sample to a digest the image itself comes back; of a mixture, images that would mix to it.
    Mahendran and Vedaldi 2015 (arXiv 1412.0035); digests: Hsu et al. 2022 (arXiv 2210.00737).
    """
    scale = digest.square().sum().clamp_min(1e-12)

    def objective(images: Tensor) -> Tensor:
        mixed = torch.einsum("s,s...->...", weights, encoder(images))
        return (mixed - digest).square().sum() / scale + smoothness * total_variation(images)

    images, _ = search_images(objective, (len(weights), *shape), generator, steps)
    return images
