"""Sites that know the server's rule, its bounds and the honest updates of the round, and choose by them.

They run the server's own strategy and bounds on each of a number of candidates, and send the one after which
the model serves them best (GOALS), as Shejwalkar and Houmansadr do against the very rule (NDSS 2021).
A candidate is the mean of the honest updates and a step from it: back along that mean, against its signs,
against its signs by the honest updates' spread (Baruch et al. 2019, arXiv 1902.06156), up the loss, and
towards what training on poisoned samples gave. They claim as many samples as a message may hold.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from flwr.app import Context, Message
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from perennial.client.site import Site
from perennial.config.experiment import Experiment
from perennial.engine.run import answer
from perennial.learning.batches import TrainingSet
from perennial.models.factory import build_model
from perennial.models.incremental import IncrementalModel
from perennial.protocol.fields import read_kind
from perennial.protocol.messages import TrainReply, TrainRequest
from perennial.protocol.stamp import MAX_EXAMPLES
from perennial.protocol.tensors import Tensors
from perennial.strategies.factory import build_strategy
from perennial.strategies.round.context import RoundContext
from perennial.strategies.round.gate import Admitted, Rejected, RunningBounds
from perennial.strategies.round.request import Arrays, RoundRequest, TaskStart

STEPS = (0.1, 0.3, 0.7, 1.5, 3.0, 8.0, 100.0)
"""Lengths of a step, in median norms of the honest updates."""
GOALS = ("adaptive", "adaptive_backdoor")
"""What the attackers want to be large: their loss, or how well the trigger and samples without it work."""
TARGET = 0
"""The class, by label, that a trigger should give."""
PATCH = 2
"""Width of the trigger, white, in the corner of the image."""


def triggered(x: Tensor) -> Tensor:
    """(n, C, H, W) stored images with a white square in the lower right corner."""
    marked = x.clone()
    marked[..., -PATCH:, -PATCH:] = 255 if x.dtype == torch.uint8 else float(x.max())
    return marked


def backdoored(data: TrainingSet, classes: int) -> TrainingSet:
    """Every second sample gets the trigger, and is called TARGET."""
    x, y = data.x.clone(), data.y.clone()
    x[::2], y[::2] = triggered(x[::2]), TARGET
    return replace(data, x=x, y=y)


@dataclass
class AdaptiveClient:
    """The ClientApp of all sites of a run, the last `liars` of which attack together.

    They answer after the others in the in-process engine. goal: one of GOALS.
    """

    experiment: Experiment
    sites: int
    liars: int
    goal: str
    _honest: dict[str, Admitted] = field(default_factory=dict)
    _number: int = 0
    _sent: Tensors | None = None
    _own: TrainingSet | None = None
    _model: IncrementalModel | None = None

    def __post_init__(self) -> None:
        section = self.experiment.strategy
        self._strategy = build_strategy(section.name, dict(section.parameters))
        self._running, self._task = RunningBounds(self.experiment.bounds, {}), 0
        self._backdoor = self.goal == "adaptive_backdoor"

    def __call__(self, message: Message, context: Context) -> Message:
        partition = int(str(context.node_config["partition-id"]))
        if message.metadata.message_type != "train":
            return answer(message, context)
        request = TrainRequest.from_record(message.content)
        if request.task != self._task:
            self._task = request.task
            self._strategy.begin_task(
                TaskStart(request.task, request.num_classes, range(0), request.arrays, ())
            )
        if request.round != self._number:
            self._honest, self._number, self._sent = {}, request.round, None
        if partition < self.sites - self.liars:
            reply = answer(message, context)
            if (content := update_of(reply)) is not None:
                site = f"site-{partition}"
                self._honest[site] = _admitted(site, content.update, content.num_examples)
            return reply
        with self._seen():
            reply = answer(message, context)
        content = update_of(reply)
        if content is None or not self._honest:
            return reply
        if self._sent is None:
            self._sent = self._chosen(request, content)
        lie = replace(content, update=self._sent, num_examples=MAX_EXAMPLES)
        return Message(lie.to_record(), reply_to=message)

    @contextmanager
    def _seen(self) -> Iterator[None]:
        """Inside, an attacker trains, on poisoned samples for a backdoor, and remembers what it holds.

        Exemplars of former tasks are among it.
        """
        honest = Site.samples

        def samples(site: Site, indices: Tensor, exemplars: int = 0) -> TrainingSet:
            data = honest(site, indices, exemplars)
            self._own = data
            return backdoored(data, 0) if self._backdoor else data

        setattr(Site, "samples", samples)  # noqa: B010
        try:
            yield
        finally:
            Site.samples = honest

    def _chosen(self, request: TrainRequest, own: TrainReply) -> Tensors:
        """The candidate that serves best, after which the attackers' copy of the server stands as it will."""
        honest = [reply.update for reply in self._honest.values()]
        stacked = {name: torch.stack([update[name] for update in honest]) for name in own.update}
        mean = {name: rows.mean(dim=0) for name, rows in stacked.items()}
        sizes = sorted(reply.norm for reply in self._honest.values())
        usual = sizes[len(sizes) // 2]
        directions: list[Arrays] = [
            {name: -tensor for name, tensor in mean.items()},
            {name: -tensor.sign() for name, tensor in mean.items()},
            {name: -tensor.sign() * stacked[name].std(dim=0) for name, tensor in mean.items()},
            self._slope(request, mean),
        ]
        if self._backdoor:
            directions = [{name: own.update[name] - mean[name] for name in mean}, directions[-1]]
        best, best_worth = Tensors(mean), float("-inf")
        for direction in directions:
            length = Tensors(direction).norm
            for step in STEPS if length > 0 else ():
                scale = step * usual / length
                candidate = Tensors({name: mean[name] + scale * direction[name] for name in mean})
                after = self._server(request, candidate, deepcopy(self._strategy), deepcopy(self._running))
                worth = self._worth(request.num_classes, after)
                if worth > best_worth:
                    best, best_worth = candidate, worth
        self._server(request, best, self._strategy, self._running)
        return best

    def _server(
        self, request: TrainRequest, sent: Tensors, strategy: Any, running: RunningBounds
    ) -> dict[str, Tensor]:
        """The model after the round if the attackers send this."""
        names = [f"site-{number}" for number in range(self.sites - self.liars, self.sites)]
        replies = [*self._honest.values(), *(_admitted(name, sent, MAX_EXAMPLES) for name in names)]
        stamp = cast(Any, request)
        ctx = RoundContext(
            cast(Any, None),
            RoundRequest(
                stamp, request.arrays, {}, 1.0, known=self.sites, bounds=running.config, running=running
            ),
            request.arrays,
            asked=len(replies),
        )
        aggregator = strategy.aggregator(ctx)
        if running.waiting:
            running.see_all(replies)
        counted = []
        for reply in replies:
            try:
                counted.append(running.bound_reply(reply, strategy.traits.accepts_scaled_updates))
                aggregator.add(counted[-1])
                ctx.outcome.participants[reply.site] = counted[-1]
            except (Rejected, OverflowError):
                continue
        running.round_done(counted)
        return aggregator.result()

    def _worth(self, classes: int, after: Arrays) -> float:
        """How well a model serves the attackers."""
        with torch.no_grad():
            return float(self._loss(classes, after))

    def _loss(self, classes: int, after: Arrays) -> Tensor:
        """() What the attackers want to be large."""
        data = self._own
        assert data is not None
        if self._model is None or self._model.num_classes != classes:
            shape = tuple(data.x.shape[1:])
            self._model = build_model(self.experiment.model, shape, classes, self.experiment.seed)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            assert self._model is not None
            return cross_entropy(functional_call(self._model, dict(after), data.floats(x)), y)

        clean = loss(data.x, data.y)
        if self._backdoor:
            return -clean - loss(triggered(data.x), torch.full_like(data.y, TARGET))
        return clean.nan_to_num(nan=0.0, posinf=1e6)

    def _slope(self, request: TrainRequest, mean: Arrays) -> dict[str, Tensor]:
        """Where the attackers' wish rises fastest, from the model with the honest mean."""
        at = {name: (request.arrays[name] + mean[name]).requires_grad_() for name in mean}
        found = torch.autograd.grad(self._loss(request.num_classes, at), list(at.values()), allow_unused=True)
        return {
            name: torch.zeros_like(at[name]) if slope is None else slope
            for name, slope in zip(at, found, strict=True)
        }


def update_of(reply: Message) -> TrainReply | None:
    """A site's reply to a training request; None where it is something else."""
    if reply.has_error() or read_kind(reply.content) != TrainReply.__name__:
        return None
    return TrainReply.from_record(reply.content)


def _admitted(site: str, update: Tensors, samples: int) -> Admitted:
    return Admitted(site, update, update.norm, samples)
