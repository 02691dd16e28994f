"""No default leaves a site out of a round for where its update points, and no later round waits for all."""

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from perennial.config.rounds import BoundsConfig
from perennial.engine.grid import set_task_identity
from perennial.protocol.messages import TrainReply
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import Tensors
from perennial.strategies.fedavg import FedAvg
from perennial.strategies.round.context import RoundContext
from perennial.strategies.round.gate import COUNTS, NORMS, RunningBounds
from tests.rounds import context, received

STAMP = Stamp(run="0" * 16, experiment="e" * 64, class_order="c" * 64, task=1, round=2, num_classes=2)


def unusual(sites: int = 6) -> Tensor:
    """(sites, 400) of one common direction with noise; the last one is an inverted hospital's."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(400, generator=generator) + 0.3 * torch.randn(sites, 400, generator=generator)
    rows[-1] *= -1
    return rows


def round_after(rounds: int, sites: int) -> tuple[FedAvg, RoundContext]:
    """FedAvg with bounds, before the round after so many."""
    set_task_identity()
    strategy = FedAvg()
    former = {NORMS: [20.0] * rounds, COUNTS: {f"site-{k}": 10 for k in range(sites)} if rounds else {}}
    strategy.exchange.names = {number + 1: f"site-{number}" for number in range(sites)}
    running = RunningBounds(BoundsConfig(norm_multiple=3), former)
    return strategy, context({"a": torch.zeros(400)}, stamp=STAMP, replies=sites, running=running)


def replies(rows: Tensor, order: Sequence[int]) -> Iterator[Message]:
    for number in order:
        content = TrainReply(**STAMP.stamp_fields, update=Tensors(a=rows[number]), num_examples=10)
        yield Message(content.to_record(), reply_to=Message(RecordDict(), number + 1, "train"))


@pytest.mark.parametrize("rounds", [0, 3])
def test_an_unusual_honest_site_counts_like_the_others_in_the_first_round_and_later(rounds: int) -> None:
    rows = unusual()
    strategy, ctx = round_after(rounds, len(rows))
    arrays, outcome = received(strategy, ctx, replies(rows, range(len(rows))))
    assert outcome.dropped == []
    assert sorted(outcome.participants) == [f"site-{number}" for number in range(len(rows))]
    assert torch.allclose(arrays["a"], rows.mean(0), atol=1e-5)


def test_the_order_of_arrival_in_a_later_round_changes_no_bit() -> None:
    rows = unusual(4)
    found = []
    for order in itertools.permutations(range(4)):
        arrays, _ = received(*round_after(3, 4), replies(rows, order))
        found.append(arrays["a"])
    assert all(torch.equal(each, found[0]) for each in found)
