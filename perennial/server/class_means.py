"""Global class means for nearest-mean classification: the sites' sums of exemplar features, added up."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from perennial.foundation.errors import ProtocolError
from perennial.protocol.messages import FinishTaskReply
from perennial.protocol.tensors import Tensors


def check_class_sums(reply: FinishTaskReply, num_classes: int, width: int, private: bool) -> None:
    """Raise ProtocolError naming the field if a site's sums cannot be sums of so many unit features.

    private: noise hides how long the sums are, so only shapes are checked.
    """
    found = reply.class_sums or {}
    shapes = {"sums": (num_classes, width), "counts": (num_classes,)}
    for name, shape in shapes.items():
        if name not in found or tuple(found[name].shape) != shape or not found[name].is_floating_point():
            what = tuple(found[name].shape) if name in found else "nothing"
            raise ProtocolError(f"FinishTaskReply: class_sums.{name}: found {what}, expected floats {shape}")
    if len(found) != len(shapes):
        raise ProtocolError(f"FinishTaskReply: class_sums: found {sorted(found)}, allowed sums, counts")
    counts = found["counts"]
    if bool((counts < 0).any()) or bool((counts != counts.round()).any()):
        raise ProtocolError("FinishTaskReply: class_sums.counts: allowed whole numbers from 0")
    if not private and bool((found["sums"].norm(dim=1) > counts * (1 + 1e-4)).any()):
        raise ProtocolError("FinishTaskReply: class_sums.sums: longer than so many unit features can be")


def global_means(replies: Mapping[str, FinishTaskReply]) -> Tensor | None:
    """(M, d) class means of unit length, a row of zeros if no site has exemplars; None without replies."""
    parts: list[Tensors] = [sums for _, reply in sorted(replies.items()) if (sums := reply.class_sums)]
    if not parts:
        return None
    sums = torch.stack([part["sums"].double() for part in parts]).sum(dim=0)
    counts = torch.stack([part["counts"] for part in parts]).sum(dim=0)
    return unit_means(sums, counts)


def unit_means(sums: Tensor, counts: Tensor) -> Tensor:
    """(M, d) means of unit length, float32; a class without samples has a row of zeros.

    sums: (M, d), of features.
    counts: (M,), of samples.
    """
    return F.normalize(sums.masked_fill(counts[:, None] == 0, 0.0), dim=1).float()
