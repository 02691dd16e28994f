"""How alike an image and its reconstruction look."""

import torch
import torch.nn.functional as F
from torch import Tensor


def structural_similarity(first: Tensor, second: Tensor) -> Tensor:
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
