"""What a ring sends, by hand."""

import pytest
import torch
from flwr.app import Message

from perennial.protocol.tensors import byte_count
from perennial.strategies.round import exchange
from perennial.strategies.serial_ring.chain import SLOWEST_POLL
from perennial.strategies.serial_ring.cost import RingCost
from perennial.strategies.serial_ring.method import SerialRing
from tests.ring_grid import START, ScriptedGrid, adds, request, services


@pytest.mark.parametrize("segments", [1, 2, 4])
def test_a_relayed_ring_sends_twice_its_segments_times_equation_23(segments: int) -> None:
    strategy = SerialRing(segments=segments, relabel="none")
    strategy.attach(services())
    grid = ScriptedGrid({site: adds(0.1) for site in "abcd"})
    strategy.train_round(grid, request(grid))
    block = strategy.summary_blocks()["ring"]
    assert block["bytes_sent"] == 2 * segments * block["bytes_equation_23"]
    assert block["bytes_equation_22"] == 2 * block["bytes_equation_23"]
    assert block["bytes_direct"] == segments * block["bytes_equation_23"] + byte_count(START)


def test_a_run_without_a_round_has_sent_nothing() -> None:
    assert set(RingCost().block().values()) == {0}


class SlowGrid(ScriptedGrid):
    """Replies are there at the fortieth look only."""

    def __init__(self) -> None:
        super().__init__({"a": adds(1.0), "b": adds(1.0)})
        self.looks = 0

    def pull_messages(self, message_ids: object) -> list[Message]:
        self.looks += 1
        return [] if self.looks % 40 else list(super().pull_messages([]))


def test_a_server_never_waits_long_between_looks_at_its_one_site(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(exchange.time, "sleep", pauses.append)
    grid = SlowGrid()
    strategy = SerialRing(segments=1, relabel="none", reshuffle="never")
    strategy.attach(services())
    outcome = strategy.train_round(grid, request(grid, deadline=60.0))
    assert outcome.arrays is not None
    assert torch.equal(outcome.arrays["head.weight"], START["head.weight"] + 2)
    assert max(pauses) <= SLOWEST_POLL < 0.1
