"""A ring without training: sites that answer with an update that is computed by hand."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Message
from torch import Tensor

from perennial.config.experiment import Experiment
from perennial.data.schedule import TaskSchedule
from perennial.engine.grid import InProcessGrid
from perennial.learning.scored import Scores
from perennial.protocol.measurements import parse_measurements
from perennial.protocol.messages import Refusal, TrainReply, TrainRequest
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import Tensors
from perennial.strategies.round.context import RunContext
from perennial.strategies.round.request import RoundRequest

Answer = Callable[[TrainRequest], Mapping[str, Tensor] | str | None]
"""From a request to an update, the reason of a refusal, or None for silence."""
START = {"first.weight": torch.tensor([1.0, -0.0]), "head.weight": torch.tensor([[2.0]])}
SETTINGS = {
    "name": "ring",
    "data": {"source": "digits", "sites": 3},
    "tasks": {"count": 1, "rounds": 3},
    "model": {"name": "mlp"},
    "learner": {"preset": "none", "optimizer": {"lr": 0.1}},
}


class ScriptedGrid(InProcessGrid):
    """answers: by site. asked: the sites in the order in which they were asked; seen: their requests."""

    def __init__(self, answers: Mapping[str, Answer]) -> None:
        super().__init__(lambda message, context: message, {})
        self.nodes = {site: number for number, site in enumerate(answers, start=1)}
        self.answers = dict(answers)
        self.asked: list[str] = []
        self.seen: list[TrainRequest] = []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        if not self._queue:
            return []
        message = self._queue.popleft()
        request = TrainRequest.from_record(message.content)
        site = next(name for name, node in self.nodes.items() if node == message.metadata.dst_node_id)
        self.asked.append(site)
        self.seen.append(request)
        answer = self.answers[site](request)
        if answer is None:
            return []
        if isinstance(answer, str):
            return [Message(Refusal(site=site, kind="data", reason=answer).to_record(), reply_to=message)]
        reply = TrainReply(
            **request.stamp_fields,
            update=Tensors(answer),
            num_examples=10,
            train_loss=0.5,
            steps=1,
            metrics=json.dumps({name: [10] for name in parse_measurements(request.settings)}),
        )
        return [Message(reply.to_record(), reply_to=message)]


def adds(amount: float) -> Answer:
    """A site whose training adds amount to every parameter."""
    return lambda request: {name: torch.full_like(t, amount) for name, t in request.arrays.items()}


def doubles_and_adds(amount: float) -> Answer:
    """A site whose training takes x to 2 x + amount, so that the order of sites shows."""
    return lambda request: {name: t + amount for name, t in request.arrays.items()}


def refuses(request: TrainRequest) -> str:
    return "no samples"


def services(folder: Path | None = None, **changes: Any) -> RunContext:
    """What a strategy needs; on its one class a model is worth the sum of its parameters, less 1,000."""

    def judge(arrays: Mapping[str, Tensor], samples: int) -> Scores:
        worth = sum(float(tensor.sum()) for tensor in arrays.values()) - 1000.0
        return Scores(1, np.zeros(1, np.int64), np.ones(1, np.bool_), np.array([worth]))

    return RunContext(
        experiment=Experiment.model_validate(SETTINGS | changes),
        schedule=TaskSchedule((0, 2), (3,)),
        input_shape=(4,),
        device=torch.device("cpu"),
        constants=None,
        load=cast(Any, None),
        measure=None,
        judge=judge,
        folder=folder,
    )


def request(
    grid: ScriptedGrid, round: int = 1, arrays: Mapping[str, Tensor] = START, deadline: float = 0.05
) -> RoundRequest:
    """A round that asks all sites of the grid."""
    stamp = Stamp(run="0" * 16, experiment="e" * 64, class_order="c" * 64, task=1, round=round, num_classes=2)
    return RoundRequest(stamp=stamp, arrays=arrays, sites=grid.nodes, deadline=deadline)
