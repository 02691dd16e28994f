"""Sites over several processes: the same bits as in one, and a process that dies is named and survived."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from flwr.app import ConfigRecord, Context, Message, RecordDict

from perennial.config.run import RunSettings
from perennial.engine import workers as workers_module
from perennial.engine.grid import build_site_contexts
from perennial.engine.run import run_in_process
from perennial.engine.workers import WorkerGrid
from perennial.foundation.errors import StateError
from perennial.protocol.messages import EvaluateReply, EvaluateRequest
from perennial.protocol.tensors import Tensors

SMALL = {
    "name": "small",
    "seed": 3,
    "data": {"source": "digits", "sites": 3, "samples_limit": 200, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "mlp"},
    "learner": {
        "preset": "none",
        "epochs": 1,
        "batch_size": 32,
        "optimizer": {"lr": 0.05},
        "distillation": {"weight": 1.0},
        "memory": {"per_class": 3},
    },
}
STAMP = {
    "run": "0" * 16,
    "experiment": "e" * 64,
    "class_order": "c" * 64,
    "task": 1,
    "round": 1,
    "num_classes": 2,
}


def run(
    folder: Path, workers: int, listener: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    experiment = folder / "experiment.yaml"
    experiment.write_text(yaml.safe_dump(SMALL))
    resume = "yes" if (folder / "small").exists() else ""
    return run_in_process(RunSettings(str(experiment), runs=str(folder), resume=resume), workers, listener)


def request() -> EvaluateRequest:
    return EvaluateRequest(**STAMP, arrays=Tensors({"w": torch.arange(6.0).reshape(2, 3)}))


def measure(message: Message, context: Context) -> Message:
    """Answers with its process and its node; node 3 kills its process, node 4 raises."""
    if context.node_id == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if context.node_id == 4:
        raise ValueError("no data today")
    arrays = EvaluateRequest.from_record(message.content).arrays
    assert arrays["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    reply = EvaluateReply(**STAMP, correct=[os.getpid()], total=[context.node_id])
    return Message(reply.to_record(), reply_to=message)


@contextmanager
def grid_of(sites: int, workers: int) -> Iterator[WorkerGrid]:
    grid = WorkerGrid(measure, build_site_contexts(sites, {}), workers)
    try:
        yield grid
    finally:
        grid.close()


def exchange(grid: WorkerGrid, nodes: list[int]) -> dict[int, Message]:
    record = request().to_record()
    messages = [Message(record, node, "evaluate") for node in nodes]
    return {reply.metadata.src_node_id: reply for reply in grid.send_and_receive(messages)}


def process_of(reply: Message) -> int:
    return EvaluateReply.from_record(reply.content).correct[0]


def test_the_number_of_workers_does_not_change_the_bits(tmp_path: Path) -> None:
    models = {workers: run(tmp_path / str(workers), workers)["model_sha256"] for workers in (1, 2, 3)}
    assert len(set(models.values())) == 1, models
    assert not multiprocessing.active_children()


def test_a_run_goes_on_without_a_killed_worker(tmp_path: Path) -> None:
    def kill_one(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 1:
            victim = next(child for child in multiprocessing.active_children() if child.name == "worker 2")
            os.kill(victim.pid or 0, signal.SIGKILL)

    summary = run(tmp_path, 2, kill_one)
    events = [json.loads(line) for line in (tmp_path / "small" / "events.jsonl").read_text().splitlines()]
    rounds = {event["round"]: event for event in events if event["event"] == "round"}
    assert [drop["site"] for drop in rounds[2]["dropped"]] == ["site-1"]
    assert "worker 2" in rounds[2]["dropped"][0]["reason"] and "SIGKILL" in rounds[2]["dropped"][0]["reason"]
    assert rounds[3]["participants"] == ["site-0", "site-1", "site-2"]
    assert summary["rounds"] == 4


def test_a_run_without_workers_ends_in_a_clear_error_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    def kill_all(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 1:
            for child in multiprocessing.active_children():
                os.kill(child.pid or 0, signal.SIGKILL)

    whole = run(tmp_path / "whole", 1)
    with pytest.raises(StateError, match=r"no worker is left: worker 1 .* SIGKILL; worker 2 .* SIGKILL"):
        run(tmp_path / "killed", 2, kill_all)
    assert run(tmp_path / "killed", 2)["model_sha256"] == whole["model_sha256"]


def test_a_site_stays_on_its_worker_and_a_shared_record_crosses_once_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, crossings = [], []

    def counted(calls: list[Any], call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: calls.append(given) or call(*given)

    contents = workers_module._Contents
    monkeypatch.setattr(workers_module, "encode_frames", counted(made, workers_module.encode_frames))
    monkeypatch.setattr(contents, "serialise", counted(crossings, contents.serialise))
    nodes = [1, 2, 5, 6]
    with grid_of(6, 2) as grid:
        first, second = exchange(grid, nodes), exchange(grid, nodes[::-1])
    assert len(made) == 2
    assert len(crossings) == 4
    processes = {node: process_of(reply) for node, reply in first.items()}
    assert processes == {node: process_of(reply) for node, reply in second.items()}
    assert processes[1] == processes[5] != processes[2] == processes[6]
    assert os.getpid() not in processes.values()


def test_a_client_that_raises_and_a_worker_that_dies_answer_with_errors() -> None:
    with grid_of(5, 2) as grid:
        replies = exchange(grid, [1, 2, 3, 4, 5])
        assert "no data today" in str(replies[4].error.reason)
        assert {node for node, reply in replies.items() if reply.has_content()} >= {2}
        for node in (3, 5):
            reason = str(replies[node].error.reason)
            assert "worker 1" in reason and "SIGKILL" in reason
        again = exchange(grid, [1, 2, 5])
        assert len({process_of(reply) for reply in again.values()}) == 1


def test_the_last_worker_s_death_is_an_error_and_not_a_wait() -> None:
    with grid_of(3, 1) as grid, pytest.raises(StateError, match=r"worker 1 .* SIGKILL"):
        exchange(grid, [3])


def test_workers_end_with_the_server() -> None:
    with grid_of(2, 2) as grid:
        assert len(exchange(grid, [1, 2])) == 2
        assert len(multiprocessing.active_children()) == 2
    assert not multiprocessing.active_children()


def device_reply(message: Message, context: Context) -> Message:
    found = ConfigRecord({"name": str(context.run_config["device"])})
    return Message(RecordDict({"device": found}), reply_to=message)


def test_each_worker_keeps_to_its_device() -> None:
    contexts = {
        node: Context(
            run_id=1,
            node_id=node,
            node_config={},
            state=RecordDict(),
            run_config={"device": "cuda", "threads": 1},
        )
        for node in (1, 2, 3)
    }
    grid = WorkerGrid(device_reply, contexts, 3, devices=["cuda:0", "cuda:1"])
    try:
        asked = [grid.create_message(RecordDict(), "train", node, "") for node in contexts]
        replies = {
            reply.metadata.src_node_id: reply.content["device"]["name"]  # pyright: ignore[reportIndexIssue]
            for reply in grid.send_and_receive(asked)
        }
    finally:
        grid.close()
    assert list(replies.values()).count("cuda:0") == 2
    assert list(replies.values()).count("cuda:1") == 1
