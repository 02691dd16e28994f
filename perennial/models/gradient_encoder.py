"""The network whose gradients encode prototype samples; server and sites build the same one from the seed.

Shapes: x (B, C, H, W) in [0, 1], output (B, M) logits. Dong et al. 2022 (GLFC, arXiv 2203.14867): four
layers; Zhu et al. 2019 (arXiv 1906.08935): sigmoids and first values wide enough for gradients that tell.
"""

import torch
from torch import Tensor, nn

from perennial.models.initialisation import seeded_initialisation

CHANNELS = 12
RANGE = 0.5


class GradientEncoder(nn.Module):
    """Three convolutions with sigmoids, the first two halving the resolution, and a linear head."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, seed: int) -> None:
        super().__init__()
        colours, height, width = input_shape
        cells = (-(-height // 4)) * (-(-width // 4))
        with seeded_initialisation(seed, "gradient-encoder", num_classes):
            self.layers = nn.Sequential(
                *(nn.Conv2d(colours, CHANNELS, 5, stride=2, padding=2), nn.Sigmoid()),
                *(nn.Conv2d(CHANNELS, CHANNELS, 5, stride=2, padding=2), nn.Sigmoid()),
                *(nn.Conv2d(CHANNELS, CHANNELS, 5, padding=2), nn.Sigmoid()),
                nn.Flatten(),
            )
            self.head = nn.Linear(CHANNELS * cells, num_classes)
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.uniform_(-RANGE, RANGE)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))

    def gradient(self, x: Tensor, label: int) -> dict[str, Tensor]:
        """The gradient of the cross entropy of one image (C, H, W), by parameter name."""
        parameters = dict(self.named_parameters())
        loss = nn.functional.cross_entropy(self(x[None]), torch.tensor([label], device=x.device))
        return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
