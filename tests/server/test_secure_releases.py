"""What a masked run with shared noise costs: the server's record beside the ledgers of the sites."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from perennial.protocol.messages import Refusal
from perennial.server.releases import Releases
from tests.strategies.test_secure_runs import PHASES, Killed, gone, serve_dying, serve_with, write

SHARED_NOISE: dict[str, Any] = {
    "secure": {"least": 3, "quorum": 3},
    "privacy": {"mode": "client_shared", "clip_norm": 1.0, "noise_multiplier": 1.0, "accountant": "rdp"},
    "tasks": {"count": 1, "rounds": 12},
    "evaluation": {"federated": False},
}


def releases_of(folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """(recorded by the server, charged at the site) numbers of releases by site."""
    found = folder / "runs" / "secure"
    ledgers = {path.parent.name: path.read_text().splitlines() for path in found.rglob("ledger.jsonl")}
    recorded = {site: len(entries) for site, entries in Releases(found).list_charged().items()}
    return recorded, {site: len(lines) for site, lines in ledgers.items()}


def refusal(message: Message, node: int) -> Message:
    no = Refusal(site=f"site-{node - 1}", kind="policy", reason="not today")
    return Message(no.to_record(), reply_to=message)


@pytest.mark.parametrize("phase", ["VoteRequest", "OpenRequest"])
def test_site_that_refuses_after_its_values_left_has_released_them(tmp_path: Path, phase: str) -> None:
    def fault(message: Message, node: int, kind: str) -> Message | None:
        return refusal(message, node) if kind == phase and node == 4 else None

    changes: dict[str, Any] = SHARED_NOISE | {"tasks": {"count": 1, "rounds": 2}}
    serve_with(tmp_path, fault, **changes)
    recorded, charged = releases_of(tmp_path)
    assert recorded == charged == dict.fromkeys(("site-0", "site-1", "site-2", "site-3"), 2)


def test_record_of_releases_never_says_less_than_the_ledgers_of_the_sites(tmp_path: Path) -> None:
    """Sites fall silent or refuse in any phase, and the server dies in one and goes on."""
    generator = np.random.Generator(np.random.PCG64(3))
    votes = iter(range(1000))

    def fault(message: Message, node: int, kind: str) -> Message | None:
        draw = generator.random()
        if kind not in PHASES or draw > 0.2:
            return None
        return gone(message) if draw > 0.1 else refusal(message, node)

    def dying(message: Message, node: int, kind: str) -> Message | None:
        if kind == "VoteRequest" and next(votes) == 7:
            raise Killed
        return fault(message, node, kind)

    with pytest.raises(Killed):
        serve_dying(Path(write(tmp_path, **SHARED_NOISE)), dying, after=False)
    serve_with(tmp_path, fault, resume=True, **SHARED_NOISE)
    recorded, charged = releases_of(tmp_path)
    assert len(charged) == 4 and sum(charged.values()) > 20
    assert all(recorded[site] >= count for site, count in charged.items()), (recorded, charged)
