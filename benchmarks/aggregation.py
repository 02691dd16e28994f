"""FedAvg of ResNet-18 updates: `aggregation time`, or `aggregation peak --updates N`; prints JSON.

time: seconds of Perennial's path from received bytes to the new model (every check of the gate, then the
exact sum) and of Flower's own aggregate_arrayrecords on the same arrays, each for 100 updates.
peak: the largest resident memory of a process that aggregates N updates as they come.
"""

import json
import resource
import time
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Annotated, Any, cast

import numpy as np
import torch
import typer
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from torch import Tensor

from perennial.engine.grid import set_task_identity
from perennial.foundation.streams import stream
from perennial.models.config import ModelConfig
from perennial.models.factory import build_model
from perennial.models.incremental import select_travelling
from perennial.protocol.messages import TrainReply
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import Tensors
from perennial.strategies.fedavg import FedAvg
from perennial.strategies.round.gate import Gate
from perennial.strategies.round.request import RoundRequest

UPDATES = 100
DISTINCT = 4
"""Updates that differ; they repeat, so that Flower's list of all replies fits in any memory."""
STAMP = Stamp(run="0" * 16, experiment="e" * 64, class_order="c" * 64, task=1, round=1, num_classes=100)


def reference() -> dict[str, Tensor]:
    """The travelling tensors of a ResNet-18 for 100 classes: 11.2 million floats."""
    return select_travelling(
        build_model(ModelConfig.model_validate({"name": "resnet18"}), (3, 32, 32), 100, seed=1)
    )


def update(like: dict[str, Tensor], number: int) -> dict[str, Array]:
    """A random update as it arrives: names and bytes."""
    generator = stream(1, "update", number)
    return {
        name: Array(generator.standard_normal(tensor.shape, dtype=np.float32) * np.float32(0.01))
        for name, tensor in like.items()
    }


def reply(arrays: dict[str, Array], like: dict[str, Tensor], examples: int) -> Message:
    """The message of a site that sends arrays."""
    message = TrainReply(
        **STAMP.stamp_fields,
        update=Tensors(like),
        num_examples=examples,
        train_loss=None,
        steps=1,
        metrics="{}",
    )
    record = message.to_record()
    record["update"] = ArrayRecord(arrays)
    return Message(record, 1, "train")


def ours(like: dict[str, Tensor], messages: Iterable[Message]) -> dict[str, Tensor]:
    """The new model, by the strategy that the server uses."""
    gate, request = Gate(like, STAMP), RoundRequest(STAMP, like, {}, 1.0, known=1024)
    aggregator = FedAvg().aggregator(FedAvg().build_context(cast(Any, None), request))
    for number, message in enumerate(messages):
        aggregator.add(gate.admit(message, f"site-{number}"))
    return aggregator.result()


def timed(repeats: int) -> dict[str, object]:
    """Seconds of both, in turns, and how far apart their results are."""
    like = reference()
    updates = [update(like, number) for number in range(DISTINCT)]
    messages = [reply(updates[n % DISTINCT], like, n + 1) for n in range(UPDATES)]
    records = [
        RecordDict({"arrays": ArrayRecord(updates[n % DISTINCT]), "m": MetricRecord({"num-examples": n + 1})})
        for n in range(UPDATES)
    ]
    seconds: list[tuple[float, float]] = []
    distance = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        new = ours(like, messages)
        middle = time.perf_counter()
        theirs = aggregate_arrayrecords(records, "num-examples")
        seconds.append((middle - start, time.perf_counter() - middle))
        distance = max(
            float((new[name] - tensor - torch.from_numpy(theirs[name].numpy())).abs().max())
            for name, tensor in like.items()
        )
    return {"seconds": seconds, "distance": distance}


def peak(updates: int) -> dict[str, object]:
    """Largest resident memory, in KiB."""
    like = reference()

    def arriving() -> Iterator[Message]:
        for number in range(updates):
            yield reply(update(like, number % DISTINCT), like, number + 1)

    ours(like, arriving())
    size = sum(tensor.numel() * tensor.element_size() for tensor in like.values())
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"peak_kib": usage.ru_maxrss, "update_kib": size // 1024}


class What(StrEnum):
    time = "time"
    peak = "peak"


def main(
    what: What,
    repeats: Annotated[int, typer.Option()] = 3,
    updates: Annotated[int, typer.Option()] = UPDATES,
) -> None:
    """Print one JSON object."""
    torch.set_num_threads(1)
    set_task_identity()
    typer.echo(json.dumps(timed(repeats) if what == What.time else peak(updates)))


if __name__ == "__main__":
    typer.run(main)
