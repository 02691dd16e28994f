"""What masks do not hide: a server that lies gets single images from one honest sum without noise."""

from pathlib import Path

import pytest
import torch

from perennial.protocol.fields import WireMessage
from perennial.protocol.messages import TrainReply
from perennial.protocol.tensors import Tensors
from tests.redteam import attacked_hospital
from tests.redteam.attacked_hospital import BASE, PIXELS, POLICIES, Hospital
from tests.redteam.hostile_server import imprint


class Sum(Hospital):
    """What opens a masked sum: the mean of several hospitals' updates, and nothing of one of them."""

    def __init__(self, hospitals: list[Hospital]) -> None:
        self.__dict__ = dict(vars(hospitals[0]))
        self.hospitals = hospitals

    def ask(self, request: WireMessage, **run_config: str) -> WireMessage | None:
        replies = [hospital.ask(request, **run_config) for hospital in self.hospitals]
        assert all(isinstance(reply, TrainReply) for reply in replies)
        first = replies[0]
        assert isinstance(first, TrainReply)
        updates = [reply.update for reply in replies if isinstance(reply, TrainReply)]
        total = {
            name: torch.stack([update[name].double() for update in updates]).mean(0) for name in first.update
        }
        return TrainReply(**{**vars(first), "update": Tensors(total)})

    def images(self, part: str = "train") -> torch.Tensor:
        return torch.cat([hospital.images(part) for hospital in self.hospitals])


def test_one_honest_sum_of_three_sites_gives_single_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean is what a masked run opens, to the bits of its grid (tests/strategies/test_secure_runs.py)."""
    from tests.redteam import hostile_server

    monkeypatch.setattr(hostile_server, "PIXELS", PIXELS)
    hospitals = []
    for name in ("site-0", "site-1", "site-2"):
        monkeypatch.setattr(attacked_hospital, "SITE", name)
        data = BASE["data"] | {"samples_limit": 60}
        hospitals.append(Hospital(tmp_path / name, POLICIES["open"], data=data))
    outcome = imprint(Sum(hospitals))
    assert outcome.recovered > 0
