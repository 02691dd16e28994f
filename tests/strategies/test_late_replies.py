"""Replies that come late, while the server already asks something else."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from flwr.app import Context, Message, RecordDict

from perennial.client.app import app as client_app
from perennial.config.run import RunSettings
from perennial.engine.grid import InProcessGrid, build_site_contexts
from perennial.foundation.errors import NOT_APPROVED
from perennial.protocol.fields import read_kind
from perennial.protocol.messages import EvaluateReply, EvaluateRequest, TrainReply, TrainRequest
from perennial.protocol.tensors import Tensors
from perennial.server.app import serve
from perennial.strategies.round import exchange as exchange_module
from perennial.strategies.round.exchange import Exchange, ask, describe_error

STAMP: dict[str, Any] = {
    "run": 16 * "a",
    "experiment": 64 * "e",
    "class_order": 64 * "c",
    "task": 1,
    "num_classes": 2,
}
MODEL = Tensors(w=torch.zeros(2))
SITES = {"a": 1, "b": 2}
SMALL = {
    "name": "late",
    "data": {"source": "digits", "sites": 3, "samples_limit": 150, "partition": {"kind": "iid"}},
    "tasks": {"count": 1, "rounds": 3},
    "model": {"name": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}},
    "rounds": {"deadline": 60},
}
CLUSTERS = {
    "name": "clustered_personalisation",
    "base": {"name": "multi_factor", "alpha": 0.7, "beta": 0.1, "gamma": 0.1, "delta": 0.1},
    "clusters": 2,
    "global_rounds": 1,
    "channels": 4,
    "layers": 1,
}
Client = Callable[[Message, Context], Message]


class SimulatedTime:
    """Stands in for the module `time`: only waiting takes time, and it takes none of ours."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


@contextmanager
def simulated_time() -> Iterator[None]:
    """The exchange with the sites reads a simulated clock."""
    with patch.object(exchange_module, "time", SimulatedTime()):
        yield


class LateGrid(InProcessGrid):
    """Replies of one kind from node 1 arrive after the server's next messages have gone out."""

    def __init__(self, client: Client, contexts: dict[int, Context], late: str) -> None:
        super().__init__(client, contexts)
        self._late, self._sent = late, 0
        self._held: list[tuple[int, Message]] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self._sent += bool(messages)
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = set(message_ids)
        for reply in super().pull_messages(wanted):
            late = reply.metadata.src_node_id == 1 and read_kind(reply.content) == self._late
            self._held.append((self._sent + late, reply))
        ready = [
            (sent, reply)
            for sent, reply in self._held
            if sent <= self._sent and reply.metadata.reply_to_message_id in wanted
        ]
        self._held = [entry for entry in self._held if entry not in ready]
        return [reply for _, reply in ready]


def site(message: Message, context: Context) -> Message:
    """Trains, and measures the round's number of right answers."""
    if read_kind(message.content) == TrainRequest.__name__:
        request = TrainRequest.from_record(message.content)
        reply = TrainReply(**request.stamp_fields, update=MODEL, num_examples=1)
    else:
        request = EvaluateRequest.from_record(message.content)
        right = int(request.arrays["w"][0])
        reply = EvaluateReply(**request.stamp_fields, correct=[right, 0], total=[9, 9])
    return Message(reply.to_record(), reply_to=message)


def train(exchange: Exchange, grid: LateGrid, number: int) -> list[tuple[str, int]]:
    """(site, round of its reply) as they come."""
    request = TrainRequest(**STAMP, round=number, arrays=MODEL)
    asked = [(name, node, request) for name, node in SITES.items() if not exchange.is_busy(name)]
    return [(name, stamp_round(reply)) for name, reply in exchange.train(grid, asked, 1.0)]


def stamp_round(reply: Message) -> int:
    return TrainReply.from_record(reply.content).round


def measure(exchange: Exchange, grid: LateGrid, value: float) -> tuple[dict[str, int], list[str]]:
    """Right answers by site, all of one round, and who did not answer."""
    dropped: list[str] = []
    request = EvaluateRequest(**STAMP, round=7, arrays=Tensors(w=torch.full((2,), value)))
    asked = [(name, node, request) for name, node in SITES.items()]
    replies = ask(
        grid, exchange, asked, EvaluateReply, 1.0, lambda name, reason: dropped.append(f"{name}: {reason}")
    )
    return {name: reply.correct[0] for name, reply in replies.items()}, dropped


def grid_of(late: str) -> LateGrid:
    return LateGrid(site, build_site_contexts(2, {}), late)


def test_a_late_update_does_not_stand_for_another_answer_and_waits_for_training() -> None:
    exchange, grid = Exchange(), grid_of("TrainReply")
    with simulated_time():
        assert train(exchange, grid, 7) == [("b", 7)]
        assert exchange.is_busy("a")
        assert measure(exchange, grid, 3) == ({"a": 3, "b": 3}, [])
        assert not exchange.is_busy("a")
        # asked again, and late again: the update of before is there, after that of the other site
        assert train(exchange, grid, 8) == [("b", 8), ("a", 7)]
        assert train(exchange, grid, 9) == [("a", 8), ("b", 9)]
    assert not exchange.late


def test_an_answer_is_to_its_own_question_even_within_one_round() -> None:
    exchange, grid = Exchange(), grid_of("EvaluateReply")
    with simulated_time():
        assert measure(exchange, grid, 3) == ({"b": 3}, ["a: no answer within 1 s"])
        grid._late = ""
        assert measure(exchange, grid, 4) == ({"a": 4, "b": 4}, [])
        assert not exchange.is_busy("a")


def run(folder: Path, late: str, **changes: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary of a run in which one kind of site-0's replies is late, and its events."""
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    run_config = dict(vars(RunSettings(str(path), runs=str(folder / "runs"))))
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run_config)
    with simulated_time():
        summary = serve(LateGrid(client_app, build_site_contexts(3, run_config), late), context, "in-process")
    lines = (folder / "runs" / "late" / "events.jsonl").read_text().splitlines()
    return summary, [json.loads(line) for line in lines]


def notes(events: list[dict[str, Any]], of: str) -> list[str]:
    return [event["text"] for event in events if event["event"] == "note" and of in event["text"]]


@pytest.mark.parametrize(("base", "taken"), [("fedavg", False), ("multi_factor", True)])
def test_a_late_update_costs_a_site_neither_its_cluster_nor_its_own_model(
    tmp_path: Path, base: str, taken: bool
) -> None:
    strategy = CLUSTERS | {"base": base}
    # own models are asked for after each personal round, while the update of that round still comes
    summary, events = run(tmp_path, "TrainReply", strategy=strategy, evaluation={"every": "round"})
    rounds = [event for event in events if event["event"] == "round"]
    assert all("site-0" in event["details"]["clusters"] for event in rounds[1:])
    assert summary["personalised_accuracy"]["site-0"][0] is not None
    assert notes(events, "site-0") == []
    # the whole model of round 1 is none of the shared layers; the update of round 2 comes in round 3
    assert ["site-0" in event["participants"] for event in rounds] == [False, False, taken]
    dropped = [[drop["site"] for drop in event["dropped"]] for event in rounds]
    assert dropped == [[], ["site-0"], [] if taken else ["site-0"]]


def test_a_late_end_of_task_costs_a_site_no_evaluation(tmp_path: Path) -> None:
    learner = {"preset": "none", "optimizer": {"lr": 0.05}, "memory": {"per_class": 2}}
    summary, events = run(tmp_path, "FinishTaskReply", learner=learner, tasks={"count": 2, "rounds": 1})
    assert notes(events, "site-0") == ["site site-0: no answer within 60 s"] * 2
    assert summary["sites"]["site-0"]["accuracy"] is not None


@pytest.mark.parametrize(
    ("reason", "unapproved"),
    [
        ("PermissionError: [Errno 13] '/flwr/apps/perennial'", True),
        ("OSError: Read-only file system: '/flwr/apps/perennial'", True),
        ("ModuleNotFoundError in '/flwr/apps/perennial'", False),
        ("PermissionError: [Errno 13] '/var/lib/perennial'", False),
    ],
)
def test_only_an_app_that_cannot_be_unpacked_is_called_unapproved(reason: str, unapproved: bool) -> None:
    assert ("has not approved" in describe_error(reason)) == unapproved
    assert (reason in describe_error(reason)) != unapproved


def test_a_reason_of_flower_is_told_apart_by_its_words() -> None:
    again = "".join(list(NOT_APPROVED))
    assert describe_error(again) == NOT_APPROVED
    assert describe_error(f"<class 'PolicyRefusal'>:<'{again}: {'ab' * 32}'>") == NOT_APPROVED
    assert describe_error("no memory") == "error at the site or on the way: no memory"
