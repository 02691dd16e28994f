"""A fuzz campaign of what a stranger can send: typed refusals, no hang, no growth of memory or disk."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, RecordDict

from perennial.client.plan import Plan
from perennial.foundation.errors import ProtocolError, suggest_nearest
from perennial.protocol.messages import DescribeRequest
from perennial.protocol.stamp import Stamp
from tests.deployed_site import DeployedSite
from tests.redteam.fuzz import EXPERIMENTS, RUNS, STATE_LIMITS, TARGETS, Failure, campaign, site_target
from tests.what_leaves import DOWN

QUICK = {"decode": 600, "yaml": 150, "site": 240}
GROWTH = 400 * 2**20
"""Bytes by which a campaign may grow after its first tenth; a leak of a message's tensors would be more."""
KINDS = {"policy", "privacy", "data", "state", "protocol", "config", "foreign"}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def check(target: str, runs: int, folder: Path) -> None:
    """A campaign that reaches both sides, and keeps within its bounds; a failing input would have raised."""
    outcomes, grown = campaign(TARGETS[target](folder), runs)
    accepted = sum(count for outcome, count in outcomes.items() if "refused" not in outcome)
    assert accepted > runs / 100, "the inputs are all too wrong to reach anything"
    assert runs - accepted > runs / 100, "the inputs are all right"
    assert grown < GROWTH
    # each site with its limits, ledger and count of requests
    disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert disk < len(EXPERIMENTS) * STATE_LIMITS["gigabytes"] * 10**9 + 50 * 10**6
    if target == "site":
        assert outcomes["answered"] > runs / 10, "enough of them reach what is behind the checks"
        assert {"answered", "refused: policy", "refused: protocol"} <= outcomes.keys()
        assert outcomes.keys() <= {"answered", *(f"refused: {kind}" for kind in KINDS)}


@pytest.mark.parametrize("target", TARGETS)
def test_a_short_campaign(target: str, tmp_path: Path) -> None:
    """An audit found 323 of 8,000 messages in the catch-all; now each refusal says whose rule it was."""
    check(target, QUICK[target], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS)
def test_one_hundred_thousand_inputs(target: str, tmp_path: Path) -> None:
    check(target, RUNS[target], tmp_path)


def test_the_catch_all_is_told_with_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, a fuzzer that swallows what it finds would pass for ever."""
    monkeypatch.setattr(Plan, "check", lambda plan, request: {}[request.task])
    with pytest.raises(Failure, match=r"seed \d+: Failure: \w+Request"):
        campaign(site_target(tmp_path), 60)


def test_the_fuzzed_requests_are_all_that_there_are(tmp_path: Path) -> None:
    made = {type(request) for request in DeployedSite(tmp_path).every_request()}
    assert made == {kind for kind in DOWN if issubclass(kind, (Stamp, DescribeRequest))}


def test_a_name_of_megabytes_in_a_message_costs_nothing_and_is_not_repeated() -> None:
    name = "experimen" * 200_000
    assert suggest_nearest(name, ["experiment"]) == ""
    fields = ConfigRecord({"message": "DescribeRequest", "version": 1, name: 1})
    with pytest.raises(ProtocolError, match="unknown field") as refusal:
        DescribeRequest.from_record(RecordDict({"fields": fields}))
    assert len(str(refusal.value)) < 300
