"""Segments of a site's data, and turns that a site refuses."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perennial.foundation.errors import ProtocolError
from perennial.protocol.messages import TrainRequest
from perennial.protocol.tensors import Tensors
from perennial.strategies.serial_ring.site import Turn, draw_segment_sizes, select_segment, turn_of


def request(settings: str = "{}", round: int = 1, task: int = 1) -> TrainRequest:
    return TrainRequest(
        run="r",
        experiment="e",
        class_order="c",
        task=task,
        round=round,
        num_classes=2,
        arrays=Tensors(w=torch.zeros(1)),
        settings=settings,
    )


def cut(indices: torch.Tensor, exemplars: int, round: int, **turn: object) -> list[tuple[torch.Tensor, int]]:
    """All segments of one round, in the order of its sweeps."""
    segments = int(str(turn["segments"]))
    turns = [Turn.model_validate({**turn, "sweep": sweep}) for sweep in range(1, segments + 1)]
    return [select_segment(each, indices, exemplars, request(round=round), 3, "site-1") for each in turns]


@given(
    samples=st.integers(8, 200),
    segments=st.integers(1, 8),
    exemplars=st.integers(0, 8),
)
def test_a_round_uses_every_sample_once(samples: int, segments: int, exemplars: int) -> None:
    indices = torch.arange(100, 100 + samples)
    parts = cut(indices, exemplars, 1, segments=segments)
    assert torch.equal(torch.cat([part for part, _ in parts]).sort().values, indices)
    assert sum(count for _, count in parts) == exemplars
    for part, count in parts:
        assert int((part >= 100 + samples - exemplars).sum()) == count
        assert len(part) >= min(32, samples // segments)


def test_segments_stay_the_same_in_a_task_and_come_in_another_order_each_round() -> None:
    indices = torch.arange(40)
    rounds = [[tuple(part.tolist()) for part, _ in cut(indices, 0, r, segments=4)] for r in range(1, 9)]
    assert all(set(one) == set(rounds[0]) for one in rounds)
    assert len(set(map(tuple, rounds))) > 1


def test_a_site_that_cannot_fill_its_segments_refuses_without_telling_its_size() -> None:
    with pytest.raises(ProtocolError, match="19 segments of at least 1 samples do not fit") as caught:
        draw_segment_sizes(Turn(sweep=1, segments=19), 17, np.random.default_rng(0))
    assert "17" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("{", "settings: not JSON"),
        ('{"turn": {"sweep": 1, "segments": 0}}', r"settings\.turn\.segments: found 0"),
        ('{"turn": {"sweep": 3, "segments": 2}}', r"sweep: found 3, allowed 1 to 2"),
        ('{"turn": {"sweep": 1, "segments": 2, "lest": 1}}', r"turn\.lest"),
    ],
)
def test_a_turn_that_makes_no_sense_is_refused_by_its_key(settings: str, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        turn_of(request(settings))
