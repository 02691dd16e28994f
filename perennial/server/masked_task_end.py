"""The end of a task under `secure`: the server opens sums of counts and of class features."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from flwr.serverapp import Grid
from torch import Tensor

from perennial.config.secure_words import class_sums_of, counts_of
from perennial.privacy.secure.server_session import NotEnough
from perennial.protocol.messages import EvaluateRequest, FinishTaskRequest
from perennial.protocol.stamp import Maskable
from perennial.protocol.tensors import content_sha256
from perennial.server.class_means import unit_means
from perennial.strategies.secure.masked_sums import MaskedSums

Request = TypeVar("Request", bound=Maskable)
Requests = Sequence[tuple[str, int, Request]]
Note = Callable[[str, str], None]


def opened_counts(
    sums: MaskedSums,
    grid: Grid,
    requests: Requests[EvaluateRequest],
    deadline: float,
    note: Note,
    *,
    noised: bool,
    beside: int = 0,
) -> tuple[list[int], list[int], list[int]] | None:
    """Open the sums of all sites' counts: (right answers, samples of each class, other counts).

    Returns None, with a note, when no sum was opened. noised: whether sites add noise, so that any count can
    be negative. beside: how many other counts there are.
    """
    try:
        statistic = requests[0][2].statistic
        opened = sums.collect(grid, statistic, _about(requests), requests, deadline, note)
        return counts_of(opened.words, requests[0][2].num_classes, noised=noised, beside=beside)
    except (NotEnough, ValueError) as missing:
        note("evaluation", str(missing))
        return None


def opened_class_means(
    sums: MaskedSums,
    grid: Grid,
    requests: Requests[FinishTaskRequest],
    sha256: str,
    width: int,
    deadline: float,
    note: Note,
) -> tuple[list[str], Tensor | None]:
    """Open the sums of class features: (sites that keep the model of this hash, (M, d) global class means).

    Returns ([], None), with a note, when no sum was opened. width: d.
    """
    try:
        opened = sums.collect(grid, "class_sums", _about(requests), requests, deadline, note)
        sums_and_counts = class_sums_of(opened.words, requests[0][2].num_classes, width)
    except (NotEnough, ValueError) as missing:
        note("class sums", str(missing))
        return [], None
    holders = list(opened.survivors) if opened.models in ((sha256,), ()) else []
    return holders, unit_means(*sums_and_counts)


def _about(requests: Sequence[tuple[str, int, EvaluateRequest | FinishTaskRequest]]) -> str:
    """The model that the sites are asked about."""
    return content_sha256(requests[0][2].arrays) if requests else ""
