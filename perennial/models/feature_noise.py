"""Noise on the features inside a model while it trains: clipped to a norm, then Gaussian.

Yan et al. 2025 (TriCon-SF, arXiv 2506.16723), equations 17 to 19. What leaves a site is the model after all
steps, and the layers below the noised one see the data directly: this gives no guarantee for an update, and
no account counts it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from perennial.foundation.errors import ConfigError


@contextmanager
def noised_features(
    model: nn.Module, module: str, clip: float, std: float, generator: torch.Generator
) -> Iterator[None]:
    """A context in which a module's outputs are clipped and noised, sample by sample.

    module: its name. clip: L2 norm of one sample's output, over all its axes. std: of the noise on each
    element. generator: on the CPU. Raises ConfigError naming a module that the model does not have.
    """
    named = dict(model.named_modules())
    if module not in named:
        there = ", ".join(name for name in named if name)
        raise ConfigError(f"feature noise: found no module {module!r}; modules: {there}")

    def noised(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        rows = output.flatten(1)
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        clipped = rows * (clip / norms.clamp_min(1e-12)).clamp_max(1.0)
        noise = torch.randn(rows.shape, generator=generator).to(rows)
        return (clipped + std * noise).view_as(output)

    handle = named[module].register_forward_hook(noised)
    try:
        yield
    finally:
        handle.remove()
