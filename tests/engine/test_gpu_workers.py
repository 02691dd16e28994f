"""GPUs dealt to workers, and runs whose settings are for a GPU, as far as a processor can show them."""

from flwr.app import ConfigRecord, Context, Message, RecordDict

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
