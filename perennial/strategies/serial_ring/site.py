"""The site half of the ring: the segment of its data that one sweep trains on.

Yan et al. 2025 (TriCon-SF, arXiv 2506.16723), equations 5 and 6. Segments are cut once for a task; a round
visits each of them once, in an order of its own, so that every sample is used once in a round.
"""

from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from perennial.data.partition import apportion
from perennial.foundation.errors import PolicyRefusal, ProtocolError
from perennial.foundation.plain import Block
from perennial.foundation.streams import stream
from perennial.learning.site_method import PlannedRun, SiteMethod, TurnStart, read_settings_part
from perennial.protocol.messages import TrainRequest
from perennial.protocol.stamp import Stamp

MOST_SEGMENTS = 10_000
USUAL_SEGMENTS = 4
"""Where an experiment names no number."""

USUAL_LEAST = 32
"""Samples below which a segment is not cut, where the site has enough."""


class Turn(Block):
    """One turn, sent in TrainRequest.settings under the key "turn".

    sweep: number of this pass of the model over all sites in its round, from 1 to segments.
    """

    sweep: Annotated[int, Field(ge=1, le=MOST_SEGMENTS)]
    segments: Annotated[int, Field(ge=1, le=MOST_SEGMENTS)]


class RingSite(SiteMethod):
    """One turn: train on a segment of the task's samples.

    A request without a turn, as in rounds of pre-training, is a usual one.
    """

    turn: Turn | None = None

    def extra_requests(self, kind: str, number: int, plan: PlannedRun) -> int:
        turns = kind == "train" and number > plan.experiment.lead_rounds(1)
        return self._segments - 1 if turns else 0

    def check(self, request: Stamp, plan: PlannedRun) -> None:
        """Check a turn's settings. Raises PolicyRefusal if they are not those of the experiment."""
        if not isinstance(request, TrainRequest):
            return
        turn, lead = turn_of(request), plan.experiment.lead_rounds(1)
        if (turn is None) != (request.round <= lead):
            raise PolicyRefusal(
                f"settings.turn: found {'none' if turn is None else 'one'} in round {request.round}; in the "
                f"approved experiment every round after {lead} of pre-training has turns, and no other"
            )
        if turn is not None and turn.segments != self._segments:
            raise PolicyRefusal(
                f"settings.turn.segments: found {turn.segments}, in the approved experiment {self._segments}"
            )

    def begin(self, start: TurnStart) -> None:
        self.start, self.turn = start, turn_of(start.request)
        if self.turn is None:
            return
        # each turn follows the one before it
        self.alone = True
        self.batch_ids = (self.turn.sweep,) if self.turn.segments > 1 else ()
        self.claim = {"segments": self.turn.segments}

    def choose(self, rows: Tensor, exemplars: int) -> tuple[Tensor, int]:
        if self.turn is None:
            return rows, exemplars
        start = self.start
        return select_segment(self.turn, rows, exemplars, start.request, start.seed, start.site)

    @property
    def _segments(self) -> int:
        return int(self.keys.get("segments", USUAL_SEGMENTS))


def turn_of(request: TrainRequest) -> Turn | None:
    """The turn in a request's settings; None outside a ring. Raises ProtocolError naming a fault in it."""
    turn = read_settings_part(request, "turn", Turn)
    if turn is not None and turn.sweep > turn.segments:
        raise ProtocolError(
            f"TrainRequest: settings.turn.sweep: found {turn.sweep}, allowed 1 to {turn.segments}"
        )
    return turn


def draw_segment_sizes(turn: Turn, samples: int, generator: np.random.Generator) -> np.ndarray:
    """Sizes of the segments, (segments,) int64: each at least USUAL_LEAST if the samples allow it.

    Raises ProtocolError if the site has too few samples; the message does not say how many.
    """
    least = max(1, min(USUAL_LEAST, samples // turn.segments))
    if turn.segments * least > samples:
        raise ProtocolError(
            f"TrainRequest: settings.turn: {turn.segments} segments of at least {least} samples do not fit "
            "the data of this task at this site"
        )
    shares = generator.dirichlet(np.ones(turn.segments))[None]
    return least + apportion(np.array([samples - turn.segments * least]), shares)[0]


def select_segment(
    turn: Turn, indices: Tensor, exemplars: int, request: TrainRequest, seed: int, site: str
) -> tuple[Tensor, int]:
    """(indices of the segment that this sweep trains on, how many of them are exemplars).

    indices: (n,), exemplars last; exemplars: how many. seed: the experiment's. With one segment all
    indices are returned.
    """
    if turn.segments == 1:
        return indices, exemplars
    generator = stream(seed, "segments", site, request.task)
    order = generator.permutation(len(indices))
    sizes = draw_segment_sizes(turn, len(indices), generator)
    dealt = np.repeat(np.arange(turn.segments), sizes)
    which = stream(seed, "segment-order", site, request.round).permutation(turn.segments)[turn.sweep - 1]
    rows = np.sort(order[dealt == which])
    return indices[torch.from_numpy(rows)], int((rows >= len(indices) - exemplars).sum())
