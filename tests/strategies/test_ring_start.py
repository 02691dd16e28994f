"""The ring under Flower's own start(), with a ClientApp that knows nothing of Perennial."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict

from perennial.engine.grid import InProcessGrid, build_site_contexts
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.serial_ring.method import SerialRing


def doubling(message: Message, context: Context) -> Message:
    """Doubles what it gets and adds its number; evaluates to nothing."""
    number = float(context.node_config["partition-id"]) + 1
    if message.metadata.message_type != "train":
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=message)
    arrays = next(iter(message.content.array_records.values()))
    trained = ArrayRecord({name: Array(2 * array.numpy() + number) for name, array in arrays.items()})
    metrics = MetricRecord({"num-examples": 3})
    return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)


def started(strategy: IncrementalStrategy, sites: int, rounds: int) -> float:
    grid = InProcessGrid(doubling, build_site_contexts(sites, {}))
    result = strategy.start(
        grid, ArrayRecord({"w": Array(np.ones(1, dtype=np.float32))}), num_rounds=rounds, timeout=5.0
    )
    assert result.arrays is not None
    return float(result.arrays["w"].numpy()[0])


def test_flowers_own_rounds_go_round_the_nodes() -> None:
    # 1 -> 2*1+1 = 3 -> 2*3+2 = 8 -> 2*8+3 = 19, and again from there: 39, 80, 163
    assert started(SerialRing(reshuffle="never"), 3, 2) == 163.0


def test_a_drawn_order_visits_every_node_once() -> None:
    # from 1: 2 (2 + 1) + 2 = 8 in the order 1, 2, and 2 (2 + 2) + 1 = 9 in the other
    assert started(SerialRing(), 2, 1) in (8.0, 9.0)
