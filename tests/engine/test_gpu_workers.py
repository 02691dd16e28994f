"""GPUs dealt to workers, and runs whose settings are for a GPU, as far as a processor can show them."""

from pathlib import Path

import yaml
from flwr.app import ConfigRecord, Context, Message, RecordDict

from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.engine.workers import WorkerGrid


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


def test_a_run_with_channels_last_is_the_same_over_workers(tmp_path: Path) -> None:
    data = {"source": "digits", "sites": 2, "samples_limit": 120, "partition": {"kind": "iid"}}
    settings = {
        "name": "last",
        "seed": 3,
        "data": data,
        "tasks": {"count": 2, "rounds": 1},
        "model": {"name": "small_cnn", "norm": "group"},
        "strategy": "scaffold",
        "learner": {
            "preset": "none",
            "epochs": 1,
            "optimizer": {"lr": 0.05},
            "distillation": {},
            "memory": {"per_class": 2},
            "channels_last": True,
            "precision": "bfloat16",
        },
    }
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(settings))
    found = [
        run_in_process(RunSettings(str(path), runs=str(tmp_path / str(workers)), device="cpu"), workers)
        for workers in (1, 2)
    ]
    assert found[0]["model_sha256"] == found[1]["model_sha256"]
