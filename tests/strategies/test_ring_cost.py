"""What a ring sends and how long it would take, by hand."""

import pytest
import torch
from flwr.app import Message
from pydantic import ValidationError

from perennial.config.link import Link
from perennial.foundation.errors import ConfigError
from perennial.protocol.tensors import byte_count
from perennial.strategies.factory import build_strategy
from perennial.strategies.ring.chain import SLOWEST_POLL
from perennial.strategies.ring.cost import RingCost
from perennial.strategies.round import exchange
from perennial.strategies.serial_ring import SerialRing
from tests.ring_grid import START, ScriptedGrid, adds, request, services


def test_the_rate_of_a_link_by_hand() -> None:
    # received power 3e-6 W against noise of 1e-12 W/Hz in 1 MHz, 1e-6 W: log2(1 + 3) = 2 bits a second and
    # hertz
    link = Link(bandwidth=1e6, power=3.0, gain=1e-6, noise=1e-12)
    assert link.rate == pytest.approx(2e6)
    assert link.seconds(1_000_000) == pytest.approx(4.0)
    whole = Link(bandwidth=1e6, power=3.0, gain=1e-6, noise=1e-6, noise_is_density=False)
    assert whole.rate == pytest.approx(2e6)


def test_a_link_without_a_band_is_refused() -> None:
    with pytest.raises(ValidationError, match="bandwidth"):
        Link(bandwidth=0.0, power=1.0, gain=1.0, noise=1.0)
    with pytest.raises(ConfigError, match=r"strategy\.link"):
        build_strategy("serial_ring", {"link": {"bandwidth": 1e6, "power": 1.0, "gain": -1.0, "noise": 1.0}})


def test_hand_overs_of_one_round_follow_each_other_on_the_link() -> None:
    settings = {"bandwidth": 1e6, "power": 3.0, "gain": 1e-6, "noise": 1e-12}
    strategy = build_strategy("serial_ring", {"segments": 2, "relabel": "none", "link": settings})
    assert isinstance(strategy, SerialRing)
    strategy.attach(services())
    grid = ScriptedGrid({site: adds(0.1) for site in "abc"})
    strategy.train_round(grid, request(grid))
    block = strategy.summary_blocks()["ring"]
    assert block["hand_overs"] == 6
    assert block["seconds_equation_15"] == pytest.approx(6 * 8 * byte_count(START) / 2e6)


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
    assert set(RingCost().block(None).values()) == {0}


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
