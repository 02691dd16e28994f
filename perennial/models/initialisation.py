"""First values of parameters, each from a stream of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod, sqrt

import numpy as np
import torch
from torch import Tensor, nn

from perennial.foundation.streams import stream, torch_seed

LINEAR_SLOPE = sqrt(5)
"""The slope that torch.nn.Linear assumes: its weights lie in +-1/sqrt(fan in)."""


@contextmanager
def seeded_initialisation(seed: int, *ids: int | str) -> Iterator[None]:
    """A context in which layers are initialised from the seed alone, whatever was drawn before.

    Layers of PyTorch and torchvision draw from the global CPU generator and take no other; this lends them a
    fresh one and then puts it back as it was. Build on the CPU and move the module afterwards.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(torch_seed(stream(seed, "init", *ids)))
        yield


def kaiming_uniform(shape: tuple[int, ...], slope: float, generator: np.random.Generator) -> Tensor:
    """Weights uniform in +-sqrt(6 / ((1 + slope^2) fan in)), fan in being the product of shape[1:].

    slope: of the leaky ReLU that follows. Drawn in float64 and rounded once, so that every machine gets the
    same bits.

    He et al. 2015 (arXiv 1502.01852).
    """
    bound = sqrt(6 / ((1 + slope**2) * prod(shape[1:])))
    return torch.from_numpy(generator.uniform(-bound, bound, size=shape).astype(np.float32))


def empty_linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer with unset values, which draws from no generator."""
    # not by nn.utils.skip_init, whose way from the meta device imports a second's worth of compiler
    layer = nn.Linear(inputs, outputs, device="meta")
    layer.weight = nn.Parameter(torch.empty(outputs, inputs))
    layer.bias = nn.Parameter(torch.empty(outputs))
    return layer


def begin_as_shortcut(norm: nn.Module) -> None:
    """Set the scale of a residual branch's last normalisation to 0, so that its block begins as its shortcut.

    With every branch at full scale, ResNet-18 under group norms diverges at the rates of the papers' recipes.

    Args:
        norm: The branch's last normalisation layer. It is changed; nothing is drawn.

    Source: Goyal et al. 2017 (arXiv 1706.02677), section 5.1.
    """
    assert isinstance(norm.weight, Tensor)
    nn.init.zeros_(norm.weight)
