"""What is sent beside the rounds is counted too: models at the end of a task, class sums, class means."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from flwr.app import Context, Message, RecordDict

from perennial.client.app import app as client_app
from perennial.config.run import RunSettings
from perennial.engine.grid import InProcessGrid, site_contexts
from perennial.protocol.messages import EvaluateReply, EvaluateRequest, FinishTaskReply, FinishTaskRequest
from perennial.server.app import serve

EXPERIMENT = {
    "name": "traffic",
    "data": {"source": "digits", "sites": 2, "samples_limit": 120, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 1},
    "model": {"name": "mlp", "hidden": [8]},
    "learner": {
        "preset": "none",
        "optimizer": {"lr": 0.05},
        "distillation": {"weight": 1.0},
        "memory": {"per_class": 2},
        "classifier": "nearest_mean",
        "means": "global",
    },
}


class Meter(InProcessGrid):
    """Adds up the tensors of what goes over it at the ends of tasks."""

    up = down = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        kept = list(messages)
        for message in kept:
            for kind in (FinishTaskRequest, EvaluateRequest):
                if message.metadata.message_type == kind.message_type:
                    self.down += kind.from_record(message.content).tensor_bytes
        return super().push_messages(kept)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        arrived = list(super().pull_messages(message_ids))
        for reply in arrived:
            for asked, kind in ((FinishTaskRequest, FinishTaskReply), (EvaluateRequest, EvaluateReply)):
                if reply.metadata.message_type == asked.message_type:
                    self.up += kind.from_record(reply.content).tensor_bytes
        return arrived


def test_the_ends_of_tasks_have_figures_beside_those_of_the_rounds(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT))
    run_config: dict[str, Any] = dict(vars(RunSettings(str(path), runs=str(tmp_path))))
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run_config)
    grid = Meter(client_app, site_contexts(2, run_config))
    summary = serve(grid, context, "in-process")
    assert grid.up > 0
    assert (summary["task_end_bytes_up"], summary["task_end_bytes_down"]) == (grid.up, grid.down)
    lines = (tmp_path / "traffic" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    for key in ("bytes_up", "bytes_down"):
        of_tasks = [event[key] for event in events if event["event"] == "task_finished"]
        assert len(of_tasks) == 2 and sum(of_tasks) == summary[f"task_end_{key}"]
        assert sum(event[key] for event in events if event["event"] == "round") == summary[key]
