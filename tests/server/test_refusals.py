"""A hospital that refuses holds up a round; it uses up none of the planned ones, and is named."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from perennial.live.diagnosis import of_run
from perennial.live.run_state import RunState
from perennial.protocol.messages import Refusal
from perennial.server import roster
from tests.live_pages import until
from tests.server.switched_grid import SwitchedGrid, SwitchedRun

QUORUM = {"quorum": 3, "max_skipped": 3}


class Refusing(SwitchedGrid):
    """Sites of these nodes refuse to train."""

    refusing: frozenset[int] = frozenset()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for reply in super().pull_messages(message_ids):
            node, trains = reply.metadata.src_node_id, reply.metadata.message_type == "train"
            if trains and node in self.refusing:
                name = f"site-{node - 1}"
                reply.content = Refusal(site=name, kind="policy", reason="not on Sundays").to_record()
            yield reply


class RefusingRun(SwitchedRun):
    grid: Refusing

    def _grid(self, resume: str) -> Refusing:
        plain = super()._grid(resume)
        grid = Refusing(self._config)
        grid.delay = plain.delay
        return grid


def test_a_refusal_costs_no_planned_round_and_the_remedy_names_the_hospital(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "FIRST_REST", 0.2)
    monkeypatch.setattr(roster, "LONGEST_REST", 0.2)
    monkeypatch.setattr(roster, "POLL", 0.05)
    whole = SwitchedRun(tmp_path / "whole", rounds=QUORUM).finish()
    run = RefusingRun(tmp_path, "grpc", rounds=QUORUM)
    run.grid.delay = 0.02
    thread = run.start()
    until(lambda: run.events("round"))
    run.grid.refusing = frozenset({2})
    # as long as whole tasks, were each attempt counted
    until(lambda: len(run.events("paused")) >= 4)
    paused: dict[str, Any] = run.events("paused")[-1]
    assert paused["refusing"] == {"site-1": "policy: not on Sundays"}
    state = RunState(run.folder)
    state.read()
    found = {fault.kind: fault for fault in of_run(state)}
    assert found["policy"].site == "site-1" and found["policy"].owner == "hospital"
    assert "not on Sundays" in found["policy"].said and "waiting" not in found
    run.grid.refusing = frozenset()
    thread.join(60)
    assert run.error is None
    assert run.summary["rounds"] == whole["rounds"] == 6
    assert run.summary["model_sha256"] == whole["model_sha256"]
    assert [event["round"] for event in run.events("round") if not event["skipped"]] == list(range(1, 7))
    assert run.summary["sites"]["site-1"]["refused"] >= 12


def test_the_remedy_of_a_rest_names_the_hospital_that_refuses(tmp_path: Path) -> None:
    state = RunState(tmp_path)
    state.alive = True
    state._take({"event": "paused", "reason": "x", "missing": [], "refusing": {"linz": "policy: no"}})
    quorum, policy = [fault for fault in of_run(state) if fault.kind in ("quorum", "policy")]
    assert quorum.owner == "nobody" and (policy.owner, policy.site) == ("hospital", "linz")
