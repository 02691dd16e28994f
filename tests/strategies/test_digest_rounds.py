"""FedDig when sites are silent, late, or lie about their digests; and when in a round it does its work."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.app import Context, Message, RecordDict

from perennial.client.app import app as client_app
from perennial.config.run import RunSettings
from perennial.engine.grid import InProcessGrid, build_site_contexts
from perennial.engine.run import run_in_process
from perennial.server.app import serve
from perennial.server.summary import extract_hashes
from perennial.strategies.fedavg import FedAvg

EXPERIMENT: dict[str, Any] = {
    "name": "rounds",
    "seed": 3,
    "data": {"source": "digits", "sites": 3, "samples_limit": 120, "partition": {"kind": "iid"}},
    "tasks": {"count": 1, "rounds": 3},
    "model": {"name": "digest_two_branch", "backbone": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}},
    "strategy": {"name": "digest_synthesis", "base": "fedavg"},
    "digests": {"per_digest": 2},
    "rounds": {"deadline": 1.0},
    "evaluation": {"federated": False},
}
LIAR = 2
"""The node of site-1."""


def settings(folder: Path, **changes: Any) -> RunSettings:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT | changes))
    return RunSettings(str(path), runs=str(folder / "runs"))


def served(folder: Path, kind: type[InProcessGrid], **changes: Any) -> list[dict[str, Any]]:
    """The events of a run over a grid of this kind."""
    run_config = dict(vars(settings(folder, **changes)))
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run_config)
    serve(kind(client_app, build_site_contexts(3, run_config)), context, "in-process")
    return [
        json.loads(line) for line in (folder / "runs" / "rounds" / "events.jsonl").read_text().splitlines()
    ]


def rounds_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "round"]


class LateGrid(InProcessGrid):
    """site-1 answers round 2 when round 3 has begun."""

    held: Message | None = None

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = list(message_ids)
        for request in list(self._queue):
            metadata = request.metadata
            asked = metadata.message_type == "train" and metadata.dst_node_id == LIAR
            if asked and request.content.config_records["fields"]["round"] == 2:
                self._queue.remove(request)
                self.held = request
        if self.held is not None and self.held.metadata.message_id in wanted and self.in_round_3:
            self._queue.appendleft(self.held)
            self.held = None
        return super().pull_messages(wanted)

    @property
    def in_round_3(self) -> bool:
        return any(
            message.metadata.message_type == "train"
            and message.content.config_records["fields"]["round"] == 3
            for message in self._queue
        )


def test_a_silent_site_is_stood_in_for_at_the_deadline_and_its_late_reply_is_dropped(tmp_path: Path) -> None:
    events = served(tmp_path, LateGrid)
    stood_in = [list(event["details"]["digests"]["stood_in"]) for event in rounds_of(events)]
    assert stood_in[:2] == [[], ["site-1"]]
    second, third = rounds_of(events)[1:]
    assert second["absent"] == ["site-1"]
    assert sorted(second["participants"]) == ["site-0", "site-2"]
    assert [fault["site"] for fault in third["dropped"]] == ["site-1"]
    assert "round" in third["dropped"][0]["reason"]


class LyingGrid(InProcessGrid):
    """site-1 answers the request for its digests with what lie() makes of the reply."""

    lie: tuple[str, object] = ("", None)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        request = self._queue[0] if self._queue else None
        for reply in super().pull_messages(message_ids):
            assert request is not None
            if request.metadata.message_type == "query.digest" and request.metadata.dst_node_id == LIAR:
                field, value = self.lie
                reply.content.config_records["fields"][field] = value  # pyright: ignore[reportArgumentType]
            yield reply


@pytest.mark.parametrize(
    ("field", "value"), [("task", 2), ("round", 7), ("class_order", "0" * 64), ("num_classes", 9)]
)
def test_stale_and_foreign_digests_are_not_kept(tmp_path: Path, field: str, value: object) -> None:
    grid = type("Lying", (LyingGrid,), {"lie": (field, value)})
    gone = [{"site": "site-1", "first_round": 2}]
    events = served(tmp_path, grid, absence=gone, rounds={"deadline": 60.0})
    held = [event["details"]["digests"]["sites"] for event in rounds_of(events)]
    assert held == [["site-0", "site-2"]] * 3
    warnings = [event.get("text", "") for event in events]
    assert any("digests of site-1" in text and field in text for text in warnings)


def test_a_whole_run_with_nobody_absent_and_no_server_epochs_has_the_bits_of_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = {"name": "digest_synthesis", "base": "fedavg", "server_epochs": 0}
    wrapped = run_in_process(settings(tmp_path, strategy=alone))
    (tmp_path / "base").mkdir()
    monkeypatch.setattr(FedAvg, "weight", lambda self, reply: 1.0)
    base = run_in_process(settings(tmp_path / "base", strategy="fedavg", digests=None))
    assert extract_hashes(wrapped) == extract_hashes(base)
