"""A fuzz campaign of what a stranger can send: typed refusals, no hang, no growth of memory or disk."""

from typing import Any

import pytest

from perennial.benchmarks.fuzz import GROWTH, RUNS, STATE_LIMITS, TARGETS, Failure, campaign, engine
from perennial.benchmarks.fuzz_inputs import Choices

QUICK = {"decode": 1_000, "yaml": 300, "site": 150}


def check(found: dict[str, Any], runs: int) -> None:
    """A campaign that did what it should, and kept within its bounds; a failing input would have raised."""
    assert found["inputs"] >= runs
    accepted = sum(count for outcome, count in found["outcomes"].items() if "refused" not in outcome)
    assert accepted > runs / 100, "the inputs are all too wrong to reach anything"
    assert found["inputs"] - accepted > runs / 100, "the inputs are all right"
    assert found["grown_bytes"] < GROWTH
    # four sites with their limits, ledgers and counts of requests
    assert found["disk_bytes"] < 4 * STATE_LIMITS["gigabytes"] * 10**9 + 50 * 10**6


@pytest.mark.parametrize("target", TARGETS)
def test_a_short_campaign(target: str) -> None:
    check(campaign(target, QUICK[target]), QUICK[target])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS)
def test_one_hundred_thousand_inputs(target: str) -> None:
    assert sum(RUNS.values()) == 100_000
    check(campaign(target, RUNS[target]), RUNS[target])


def test_a_campaign_fails_with_the_input_that_ended_as_none_may() -> None:
    """Without it, a fuzzer that swallows what it finds would pass for ever."""
    with pytest.raises(Failure, match="ZeroDivisionError"):
        campaign("planted", 200)


def test_the_bytes_of_an_input_decide_and_end() -> None:
    choices = Choices(b"\x05\x00\xff\xff")
    assert (choices.number(10), choices.number(2**16), choices.number(10)) == (5, 65_535, 0)
    assert engine() in ("atheris", "hypothesis")


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
