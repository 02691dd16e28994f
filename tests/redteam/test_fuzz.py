"""A fuzz campaign of what a stranger can send: typed refusals, no hang, no growth of memory or disk."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from perennial.client.plan import Plan
from perennial.protocol.messages import DescribeRequest
from perennial.protocol.stamp import Stamp
from tests.deployed_site import DeployedSite
from tests.redteam.fuzz import (
    EXPERIMENTS,
    GROWTH,
    RUNS,
    STATE_LIMITS,
    TARGETS,
    Failure,
    campaign,
    random_bytes,
    site_target,
)
from tests.redteam.fuzz_inputs import Choices
from tests.what_leaves import DOWN

QUICK = {"decode": 1_000, "yaml": 300, "site": 150}


def check(found: dict[str, Any], runs: int) -> None:
    """A campaign that did what it should, and kept within its bounds; a failing input would have raised."""
    assert found["inputs"] >= runs
    accepted = sum(count for outcome, count in found["outcomes"].items() if "refused" not in outcome)
    assert accepted > runs / 100, "the inputs are all too wrong to reach anything"
    assert found["inputs"] - accepted > runs / 100, "the inputs are all right"
    assert found["grown_bytes"] < GROWTH
    # each site with its limits, ledger and count of requests
    assert found["disk_bytes"] < len(EXPERIMENTS) * STATE_LIMITS["gigabytes"] * 10**9 + 50 * 10**6


@pytest.mark.parametrize("target", TARGETS)
def test_a_short_campaign(target: str) -> None:
    check(campaign(target, QUICK[target]), QUICK[target])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS)
def test_one_hundred_thousand_inputs(target: str) -> None:
    assert sum(RUNS.values()) == 100_000
    check(campaign(target, RUNS[target]), RUNS[target])


def catch_alls(folder: Path, messages: int) -> tuple[int, Counter[str]]:
    """(messages of a seeded sample that ended in the catch-all refusal, how the others ended)."""
    send, found, caught = site_target(folder), Counter[str](), 0
    for seed in range(messages):
        try:
            found[send(random_bytes(seed))] += 1
        except Failure:
            caught += 1
    return caught, found


def test_no_message_of_a_seeded_sample_ends_in_the_catch_all(tmp_path: Path) -> None:
    """An audit found 323 of 8,000. Each refusal has a kind that says whose rule it was."""
    caught, found = catch_alls(tmp_path, 600)
    assert caught == 0
    assert {"answered", "refused: policy", "refused: protocol"} <= found.keys()
    kinds = {"policy", "privacy", "data", "state", "protocol", "config", "foreign"}
    assert found.keys() <= {"answered", *(f"refused: {kind}" for kind in kinds)}
    assert found["answered"] > 60, "enough of them reach what is behind the checks"


def test_the_catch_all_is_counted_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "check", lambda plan, request: {}[request.task])
    caught, _ = catch_alls(tmp_path, 60)
    assert caught > 5


def test_the_fuzzed_requests_are_all_that_there_are(tmp_path: Path) -> None:
    made = {type(request) for request in DeployedSite(tmp_path).every_request()}
    assert made == {kind for kind in DOWN if issubclass(kind, (Stamp, DescribeRequest))}


def test_a_campaign_fails_with_the_input_that_ended_as_none_may() -> None:
    """Without it, a fuzzer that swallows what it finds would pass for ever."""
    with pytest.raises(Failure, match="ZeroDivisionError"):
        campaign("planted", 200)


def test_the_bytes_of_an_input_decide_and_end() -> None:
    choices = Choices(b"\x05\x00\xff\xff")
    assert (choices.number(10), choices.number(2**16), choices.number(10)) == (5, 65_535, 0)


def test_a_name_of_megabytes_in_a_message_costs_nothing_and_is_not_repeated() -> None:
    from flwr.app import ConfigRecord, RecordDict

    from perennial.foundation.errors import ProtocolError, nearest
    from perennial.protocol.messages import DescribeRequest

    name = "experimen" * 200_000
    assert nearest(name, ["experiment"]) == ""
    fields = ConfigRecord({"message": "DescribeRequest", "version": 1, name: 1})
    with pytest.raises(ProtocolError, match="unknown field") as refusal:
        DescribeRequest.from_record(RecordDict({"fields": fields}))
    assert len(str(refusal.value)) < 300
