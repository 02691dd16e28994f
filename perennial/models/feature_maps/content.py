"""The hash that identifies a fixed map."""

import hashlib
from collections.abc import Iterable, Mapping

from torch import Tensor


def content_of(parts: Iterable[tuple[str, Mapping[str, Tensor]]]) -> str:
    """SHA-256 over parts in order, each (a text of what tensors do not say, tensors by name)."""
    digest = hashlib.sha256()
    for about, tensors in parts:
        digest.update(f"{about};".encode())
        for name in sorted(tensors):
            tensor = tensors[name].detach().cpu().contiguous()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(tensor.numpy().data)
    return digest.hexdigest()
