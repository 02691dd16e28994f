"""A federation of one-dimensional quadratics F_k(w) = (w - a_k)^2 / 2, trained by the real local
corrections."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from perennial.client.state import SiteState
from perennial.config.learner import LearnerConfig
from perennial.config.strategies import SITE_HALVES
from perennial.learning.site_method import FedProx, LocalTurn, SiteMethods, find_site_half
from perennial.models.flat import FlatParameters
from perennial.privacy.config import PrivacyConfig
from perennial.protocol.messages import TrainRequest
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import Tensors
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.round.context import RunContext
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.request import TaskStart
from tests.rounds import begun

STAMP = Stamp(run="0" * 16, experiment="e" * 64, class_order="c" * 64, task=1, round=1, num_classes=1)


class Point(nn.Module):
    """A model that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))


@dataclass
class Federation:
    """Sites with optima `optima`, by name; each does `steps` full-gradient steps of size lr in a round."""

    strategy: IncrementalStrategy
    folder: Path
    optima: dict[str, float]
    steps: dict[str, int]
    lr: float = 0.5
    mu: float = 0.0
    samples: dict[str, int] = field(default_factory=dict)
    point: float = 1.0
    round: int = 0

    def __post_init__(self) -> None:
        correction = {"name": "fedprox", "mu": self.mu} if self.mu else None
        self.learner = LearnerConfig.model_validate(
            {"preset": "none", "optimizer": {"lr": self.lr}, "correction": correction}
        )
        experiment = SimpleNamespace(learner=self.learner, privacy=PrivacyConfig(), seed=1)
        self.strategy.attach(cast(RunContext, SimpleNamespace(experiment=experiment, sums=None)))
        self.strategy.begin_task(TaskStart(1, 1, range(1), self.arrays, tuple(sorted(self.optima))))

    @property
    def arrays(self) -> dict[str, Tensor]:
        return {"w": torch.tensor([self.point])}

    def play(self, sites: str = "", lost: str = "") -> float:
        """One round with the given sites (default: all); returns the new point. lost: sites whose replies do
        not come back."""
        self.round += 1
        names = list(sites) if sites else sorted(self.optima)
        replies = [self._reply(name, self.round) for name in names]
        round_ = begun(self.strategy, self.arrays)
        for reply in replies:
            if reply.site in lost:
                continue
            round_.add(reply)
        self.point = float(round_.result()["w"])
        return self.point

    def locals(self, name: str) -> float:
        """Where one site's steps of the next round would end."""
        return self.point + float(self._reply(name, self.round + 1, remember=False).update["w"])

    def _reply(self, name: str, number: int, remember: bool = True) -> Admitted:
        stamp = {**STAMP.stamp_fields, "round": number}
        request = self.strategy.requests(TrainRequest(**stamp, arrays=Tensors(self.arrays)), [name])[name]
        model = Point()
        flat = FlatParameters(model)
        flat.load(request.arrays)
        before = flat.vector.clone()
        name_of = getattr(self.strategy, "name", "")
        half = find_site_half(name_of) if name_of in SITE_HALVES else None
        keys = {key: vars(self.strategy)[key] for key in ("alpha", "mu") if key in vars(self.strategy)}
        proximal = [FedProx({"mu": self.mu})] if self.mu else []
        methods = SiteMethods([*proximal, *([half(keys)] if half is not None else [])])
        state, device = SiteState(self.folder / name, name), flat.vector.device
        methods.open(LocalTurn(name, 1, request, state, self.learner, flat, (1,), device))
        correction = methods.correction
        for _ in range(self.steps[name]):
            gradient = flat.vector - self.optima[name]
            if correction is not None:
                correction.apply(gradient, flat.trainable, before)
            flat.vector.sub_(self.lr * gradient)
        update = flat.vector - before
        if remember:
            methods.close(update, self.steps[name])
        facts: dict[str, Any] = {"base_round": number, "norm": float(update.abs()), "steps": self.steps[name]}
        return Admitted(name, flat.view_tensors(update), num_examples=self.samples.get(name, 1), **facts)
