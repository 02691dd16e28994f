"""The device on which a process trains and measures, and the precision of its products and convolutions.

float32 is exact float32 on a GPU too. tf32 rounds what goes into products and convolutions of a GPU to 10
bits and is float32 on a processor. bfloat16 is autocast of the forward pass. They change bits, so they are
part of the experiment; parameters, updates, logits and losses are float32 under each of them.
"""

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from perennial.config.learner import LearnerConfig
from perennial.foundation.errors import ConfigError, StateError


def choose_device(device: str) -> torch.device:
    """The device called `device`: cpu, cuda, cuda:N, or auto for the GPU if there is one.

    Raises ConfigError for any other word, and StateError when a GPU is asked for that is not there.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", device):
        raise ConfigError(
            f"device: found {device!r}, allowed auto, cpu, cuda, or cuda:N for one of several GPUs"
        )
    if device.startswith("cuda"):
        _require_gpu(device)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda"):
        # cuBLAS reads it with its first product, which without it may add in another order each time
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return torch.device(device)


def list_worker_devices(device: str) -> list[str]:
    """Names of the devices that worker processes share: every GPU for cuda, and for auto if there is one.

    Raises as choose_device does.
    """
    if choose_device(device).type == "cpu" or device.startswith("cuda:"):
        return [device]
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())]


def _require_gpu(device: str) -> None:
    if not torch.cuda.is_available():
        raise StateError(f"device: found {device!r}, but PyTorch sees no GPU; allowed here: cpu, auto")
    number, seen = int(device.partition(":")[2] or 0), torch.cuda.device_count()
    if number >= seen:
        raise StateError(
            f"device: found {device!r}, but PyTorch sees {seen} GPUs; allowed: cuda:0 to cuda:{seen - 1}"
        )


def use_products_of(config: LearnerConfig) -> None:
    """Set for this process whether a GPU multiplies in TF32, as the learner's precision says."""
    rounds = config.precision == "tf32"
    # the one way in which both halves of cuDNN agree: PyTorch exports no model while they differ
    torch.backends.cuda.matmul.allow_tf32 = rounds
    torch.backends.cudnn.allow_tf32 = rounds


def use_precision(config: LearnerConfig, device: torch.device) -> AbstractContextManager[None]:
    """A context in which the forward pass runs in bfloat16 if the learner asks for it, else unchanged."""
    return _use_bfloat16(device) if config.precision == "bfloat16" else nullcontext()


@contextmanager
def _use_bfloat16(device: torch.device) -> Iterator[None]:
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
