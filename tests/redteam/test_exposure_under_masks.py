"""What masks do not hide: a server that lies gets single images from one honest sum without noise."""

from pathlib import Path

import pytest
import torch

from perennial.client.exposure import channels, in_one_sentence
from perennial.config.site import SitePolicy
from perennial.protocol.fields import WireMessage
from perennial.protocol.messages import TrainReply
from perennial.protocol.tensors import Tensors
from tests.redteam import attacked_hospital
from tests.redteam.attacked_hospital import BASE, PIXELS, POLICIES, Hospital, template_policy
from tests.redteam.hostile_server import imprint

SECURE = {"answers": ["train"], "require_secure": True, "least_sites": 3, "peers": {"b": "0" * 32}}
UNITS = 600


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
    found = {channel.name: channel for channel in channels(SitePolicy.model_validate(SECURE))}
    assert found["updates"].recovers and found["updates"].cell.protection == "masks"


@pytest.mark.parametrize(
    ("changes", "images"),
    [
        ({}, True),
        ({"require_privacy": "client_shared", "max_epsilon": 8.0}, False),
        ({"require_privacy": "sample_shared", "max_epsilon": 8.0}, False),
        ({"require_privacy": "sample", "max_epsilon": 8.0}, False),
        ({"require_privacy": "client_local", "max_epsilon": 8.0}, False),
        ({"require_privacy": "client_central", "max_epsilon": 8.0}, True),
        ({"require_privacy": "client_shared", "max_epsilon": 8.0, "peers": {}}, True),
    ],
)
@pytest.mark.parametrize("answers", [["train"], ["statistics"], ["train", "statistics"]])
def test_only_noise_that_a_server_cannot_take_off_says_no(
    changes: dict[str, object], images: bool, answers: list[str]
) -> None:
    policy = SitePolicy.model_validate(SECURE | changes | {"answers": answers})
    if policy.require_privacy == "client_central" and "train" not in answers:
        return  # sums of features have no such mode
    assert any(channel.recovers for channel in channels(policy)) == images
    assert ("single images of patients" in in_one_sentence(policy)) == images


def test_the_sentence_of_the_template_is_a_bound_and_that_of_a_closed_site_is_nothing() -> None:
    template = SitePolicy.model_validate(template_policy())
    assert in_one_sentence(template) == (
        "under this policy the server can learn of one sample what epsilon 8 at delta 1e-05 allows over all "
        "runs together, by updates"
    )
    assert "nothing that is computed" in in_one_sentence(SitePolicy(answers=[]))
