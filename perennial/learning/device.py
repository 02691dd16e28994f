"""The device on which a process trains and measures."""

import os
import re

import torch

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


def worker_devices(device: str) -> list[str]:
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
