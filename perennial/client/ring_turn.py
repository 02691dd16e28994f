"""A site's turn in a ring: the segment of its data that one sweep trains on.

Yan et al. 2025 (TriCon-SF, arXiv 2506.16723), equations 5 and 6. Segments are cut once for a task; a round
visits each of them once, in an order of its own, so that every sample is used once in a round.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from perennial.config.turn import Turn
from perennial.data.partition import apportion
from perennial.foundation.errors import ProtocolError
from perennial.foundation.streams import stream, torch_seed
from perennial.learning.site_method import part_of_settings
from perennial.models.feature_noise import noised_features
from perennial.protocol.messages import TrainRequest

USUAL_LEAST = 32
"""Samples below which a segment is not cut, where the server names no number and the site has enough."""


def turn_of(request: TrainRequest) -> Turn | None:
    """The turn in a request's settings; None outside a ring. Raises ProtocolError naming a fault in it."""
    turn = part_of_settings(request, "turn", Turn)
    if turn is not None and turn.sweep > turn.segments:
        raise ProtocolError(
            f"TrainRequest: settings.turn.sweep: found {turn.sweep}, allowed 1 to {turn.segments}"
        )
    return turn


def segment_sizes(turn: Turn, samples: int, generator: np.random.Generator) -> np.ndarray:
    """Sizes of the segments, (segments,) int64: each at least the turn's least, together `samples`.

    Raises ProtocolError if the site has too few samples; the message does not say how many.
    """
    least = turn.least or max(1, min(USUAL_LEAST, samples // turn.segments))
    if turn.segments * least > samples:
        raise ProtocolError(
            f"TrainRequest: settings.turn: {turn.segments} segments of at least {least} samples do not fit "
            "the data of this task at this site"
        )
    if turn.sizes == "equal":
        return apportion(np.array([samples]), np.ones((1, turn.segments)))[0]
    shares = generator.dirichlet(np.ones(turn.segments))[None]
    return least + apportion(np.array([samples - turn.segments * least]), shares)[0]


def segment_of(
    turn: Turn, indices: Tensor, labels: Tensor, exemplars: int, request: TrainRequest, seed: int, site: str
) -> tuple[Tensor, int]:
    """(indices of the segment that this sweep trains on, how many of them are exemplars).

    indices, labels: (n,), exemplars last; exemplars: how many. seed: the experiment's. With one segment all
    indices are returned.
    """
    if turn.segments == 1:
        return indices, exemplars
    generator = stream(seed, "segments", site, request.task)
    order = generator.permutation(len(indices))
    sizes = segment_sizes(turn, len(indices), generator)
    dealt = np.repeat(np.arange(turn.segments), sizes)
    if turn.stratify:
        order = order[np.argsort(labels.cpu().numpy()[order], kind="stable")]
        # each segment's samples spread evenly over all, so that every stretch has its part of each segment
        places = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes.tolist()])
        dealt = dealt[np.argsort(places, kind="stable")]
    which = stream(seed, "segment-order", site, request.round).permutation(turn.segments)[turn.sweep - 1]
    rows = np.sort(order[dealt == which])
    return indices[torch.from_numpy(rows)], int((rows >= len(indices) - exemplars).sum())


@contextmanager
def features_as_asked(
    turn: Turn | None, model: nn.Module, request: TrainRequest, seed: int, site: str
) -> Iterator[None]:
    """Context manager: the model trains with noise on its features if the turn asks for it."""
    if turn is None or turn.features is None:
        yield
        return
    asked = turn.features
    drawn = torch_seed(stream(seed, "feature-noise", site, request.round, turn.sweep))
    with noised_features(model, asked.module, asked.clip, asked.std, torch.Generator().manual_seed(drawn)):
        yield
