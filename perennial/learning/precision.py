"""The precision of matrix products and convolutions, in training and in evaluation.

float32 is exact float32 on a GPU too. tf32 rounds what goes into products and convolutions of a GPU to 10
bits and is float32 on a processor. bfloat16 is autocast of the forward pass. They change bits, so they are
part of the experiment; parameters, updates, logits and losses are float32 under each of them.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from perennial.config.learner import LearnerConfig


def use_products_of(config: LearnerConfig) -> None:
    """Set for this process whether a GPU multiplies in TF32, as the learner's precision says."""
    rounds = config.precision == "tf32"
    # the one way in which both halves of cuDNN agree: PyTorch exports no model while they differ
    torch.backends.cuda.matmul.allow_tf32 = rounds
    torch.backends.cudnn.allow_tf32 = rounds


def autocast(config: LearnerConfig, device: torch.device) -> AbstractContextManager[None]:
    """A context in which the forward pass runs in bfloat16 if the learner asks for it, else unchanged."""
    return _bfloat16(device) if config.precision == "bfloat16" else nullcontext()


@contextmanager
def _bfloat16(device: torch.device) -> Iterator[None]:
    with torch.autocast(device.type, dtype=torch.bfloat16), GroupNormInside():
        yield


class GroupNormInside(TorchFunctionMode):
    """A mode in which group norms take bfloat16 directly; their sums are in float32 inside the kernel.

    Left to itself, autocast on a GPU converts their inputs to float32 and back, and so moves three times the
    bytes between two convolutions.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func != F.group_norm:
            return func(*args, **(kwargs or {}))
        return _group_norm(*args, **(kwargs or {}))


def _group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    scale = None if weight is None else weight.to(input.dtype)
    shift = None if bias is None else bias.to(input.dtype)
    with torch.autocast(input.device.type, enabled=False):
        return F.group_norm(input, num_groups, scale, shift, eps)
