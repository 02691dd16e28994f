"""The Gaussian head of a gradient method: the sites' exact sums over features that were learnt, added up."""

from collections.abc import Mapping
from functools import reduce
from operator import add

import torch
from torch import Tensor

from perennial.foundation.errors import DataError, ProtocolError
from perennial.learning.analytic.solve import Sums, gaussian
from perennial.learning.analytic.statistics import Statistics, SumsForm
from perennial.protocol.messages import FinishTaskReply
from perennial.strategies.statistics.checks import check_exact, read_statistics


def check_sums(reply: FinishTaskReply, width: int) -> None:
    """Raises ProtocolError when no samples have the sums of a reply. width: of the features."""
    check_exact(_sums(reply, width))


def gaussian_head(replies: Mapping[str, FinishTaskReply], width: int, shrinkage: float) -> Tensor:
    """(M, d + 1) float32: weights and bias of each class; one without samples is never predicted.

    Raises DataError when the samples of all sites do not determine it.
    """
    if not replies:
        raise DataError("no site sent sums")
    total = reduce(add, (_sums(reply, width) for reply in replies.values()))
    tensors = gaussian(Sums.of(total), shrinkage).tensors()
    return torch.cat([tensors["head.weight"], tensors["head.bias"][:, None]], dim=1)


def _sums(reply: FinishTaskReply, width: int) -> Statistics:
    if reply.statistics is None:
        raise ProtocolError("FinishTaskReply: statistics: found nothing, expected sums of features")
    return read_statistics(reply.statistics, SumsForm(width + 1), range(reply.num_classes))
