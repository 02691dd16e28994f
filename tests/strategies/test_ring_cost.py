"""What a ring sends, by hand."""

import pytest

from perennial.protocol.tensors import count_bytes
from perennial.strategies.serial_ring.method import SerialRing
from tests.strategies.ring_grid import START, ScriptedGrid, adds, request, services


@pytest.mark.parametrize("segments", [1, 2, 4])
def test_a_relayed_ring_sends_twice_its_segments_times_equation_23(segments: int) -> None:
    strategy = SerialRing(segments=segments, relabel="none")
    strategy.attach(services())
    grid = ScriptedGrid({site: adds(0.1) for site in "abcd"})
    strategy.train_round(grid, request(grid))
    block = strategy.summary_blocks()["ring"]
    assert block["bytes_sent"] == 2 * segments * block["bytes_equation_23"]
    assert block["bytes_equation_22"] == 2 * block["bytes_equation_23"]
    assert block["bytes_direct"] == segments * block["bytes_equation_23"] + count_bytes(START)
