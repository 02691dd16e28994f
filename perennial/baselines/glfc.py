"""GLFC's proxy server: chooses the best of a task's models by images made from the sites' gradients.

Sites that notice new classes send gradients of perturbed prototypes; the server makes images of them, and by
these chooses which of a task's models is the old model of the next. Dong et al. 2022 (CVPR, arXiv
2203.14867).

The other half, class-aware gradient compensation and class-semantic relation distillation, is two parts of
the learner: `classification: gradient_compensation` and `distillation: {form: all_classes}`.

Symbols: k prototypes of one reply, n images made in this task.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from perennial.config.strategies import ASKS
from perennial.data.augmentation import to_float
from perennial.foundation.errors import ConfigError
from perennial.foundation.streams import stream, torch_seed
from perennial.models.gradient_encoder import GradientEncoder
from perennial.privacy.attacks.gradient_inversion import invert_gradient
from perennial.protocol.messages import TrainRequest
from perennial.strategies.fedavg import FedAvg, WeightedMean
from perennial.strategies.round.context import Aggregator, RoundContext
from perennial.strategies.round.gate import Admitted, Rejected
from perennial.strategies.round.nested_state import nested, part
from perennial.strategies.round.request import TaskStart, with_settings
from perennial.strategies.round.run_context import RunContext
from perennial.strategies.round.traits import Traits


class Glfc(FedAvg):
    """FedAvg that ends each task with the task's best model, judged on images made from sites' gradients.

    Of equal models the latest counts.

    noise: on a prototype, in deviations of its class's pixels.
    entropy_rise: nats from one round to the next that a site takes for new classes (the paper: 1.2, with a
    hundred classes).
    per_class: images of a class at most, of the first sites by name.
    steps: of the search for an image.

    The paper sends the best model as the old one only; here it ends the task, so it is also what the next
    task starts from.
    """

    asks = ASKS["glfc"]
    # its choice is of one model, the old one of every site
    traits = Traits(
        runs_per_cluster=False,
        requires="gradients of prototypes from the sites, and the server's model",
    )

    def __init__(
        self,
        noise: float = 0.1,
        entropy_rise: float = 0.2,
        per_class: int = 2,
        steps: int = 100,
        max_update_norm: float | None = None,
        **flower: Any,
    ) -> None:
        super().__init__(max_update_norm, **flower)
        if not 0 <= noise <= 100 or not 0 <= entropy_rise <= 100 or per_class < 1 or steps < 1:
            raise ValueError("allowed noise and entropy_rise from 0 to 100, per_class and steps from 1")
        self.noise, self.entropy_rise = noise, entropy_rise
        self.per_class, self.steps = per_class, steps
        self.images, self.labels = torch.empty(0), torch.empty(0, dtype=torch.int64)
        self.best: dict[str, Tensor] = {}
        self.best_score = -1.0

    def attach(self, run: RunContext) -> None:
        """Prepare for a run. Raises ConfigError if inputs are no images or their scale is unknown."""
        if len(run.input_shape) != 3 or run.constants is None:
            raise ConfigError("strategy glfc: makes images; allowed with images whose mean and std are known")
        super().attach(run)
        self.constants = run.constants

    def begin_task(self, task: TaskStart) -> None:
        self.images, self.labels = torch.empty(0), torch.empty(0, dtype=torch.int64)
        self.best, self.best_score = {}, -1.0

    def requests(self, request: TrainRequest, sites: Sequence[str]) -> dict[str, TrainRequest]:
        order = {"noise": self.noise, "entropy_rise": self.entropy_rise}
        return dict.fromkeys(sites, with_settings(request, prototypes=order))

    def aggregator(self, ctx: RoundContext) -> Aggregator:
        return JudgedMean(ctx, self)

    def state_dict(self) -> dict[str, Any]:
        made = {"images": self.images, "labels": self.labels}
        return {**nested("best", self.best), **nested("made", made), "score": self.best_score}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        made = part("made", state)
        self.images, self.labels = made["images"], made["labels"]
        self.best, self.best_score = part("best", state), float(state["score"])


class JudgedMean(WeightedMean):
    """Averages a round's updates, makes images of its gradients, and judges the round's model by them."""

    def __init__(self, ctx: RoundContext, method: Glfc) -> None:
        super().__init__(ctx, method)
        self._glfc, self._stamp = method, ctx.request.stamp
        self._arrived: dict[str, dict[str, Tensor]] = {}
        self._known = method.attached and ctx.by_curriculum

    def add(self, reply: Admitted) -> None:
        gradients = part("prototypes", reply.method)
        if gradients:
            self._arrived[reply.site] = self._checked(gradients)
        super().add(reply)

    def result(self) -> dict[str, Tensor]:
        arrays = super().result()
        if not self._known:
            return arrays
        for site in sorted(self._arrived):
            self._reconstruct(self._arrived[site], site)
        score = self._score(arrays)
        if score >= self._glfc.best_score:
            self._glfc.best_score = score
            self._glfc.best = {name: value.clone() for name, value in arrays.items()}
        self.ctx.outcome.details |= {
            "transitions": sorted(self._arrived),
            "images": len(self._glfc.labels),
            "accuracy_on_images": score,
        }
        return self._glfc.best if self._stamp.round == self._last_round() else arrays

    @property
    def _new_classes(self) -> range:
        return self._glfc.run.schedule.classes_of(self._stamp.task)

    def _encoder(self) -> GradientEncoder:
        return GradientEncoder(
            self._glfc.run.input_shape, self._stamp.num_classes, self._glfc.run.experiment.seed
        )

    def _checked(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Raises Rejected where a site sent anything but k gradients of the encoder."""
        if not self._known:
            raise Rejected("prototypes: found gradients that nobody asked for")
        expected = {name: tuple(value.shape) for name, value in self._encoder().named_parameters()}
        found = {name: tuple(value.shape[1:]) for name, value in gradients.items() if value.dim()}
        counts = {len(value) for value in gradients.values() if value.dim()}
        most = len(self._new_classes)
        if found != expected or len(counts) != 1 or not 1 <= counts.pop() <= most:
            raise Rejected(
                f"prototypes: found {found!r:.80}, allowed gradients of up to {most} samples in the "
                "encoder's shapes"
            )
        if not all(value.dtype == torch.float32 and value.isfinite().all() for value in gradients.values()):
            raise Rejected("prototypes: found a value that is no finite 32-bit float")
        return dict(gradients)

    def _reconstruct(self, gradients: Mapping[str, Tensor], site: str) -> None:
        """Add images to the task's, where their class is new and wanted."""
        encoder, shape = self._encoder(), self._glfc.run.input_shape
        size: tuple[int, int, int] = (shape[0], shape[1], shape[2])
        for place in range(len(gradients["head.bias"])):
            gradient = {name: value[place] for name, value in gradients.items()}
            # cross entropy lowers the bias of no class but the sample's own (Zhao et al. 2020)
            label = int(gradient["head.bias"].argmin())
            if (
                label not in self._new_classes
                or int((self._glfc.labels == label).sum()) >= self._glfc.per_class
            ):
                continue
            seed = torch_seed(
                stream(self._glfc.run.experiment.seed, "reconstruction", site, self._stamp.round, place)
            )
            made = invert_gradient(
                encoder,
                gradient,
                size,
                torch.Generator().manual_seed(seed),
                labels=torch.tensor([label]),
                steps=self._glfc.steps,
            )
            self._glfc.images = torch.cat([self._glfc.images.view(-1, *size), made.images])
            self._glfc.labels = torch.cat([self._glfc.labels, made.labels])

    @torch.no_grad()
    def _score(self, arrays: Mapping[str, Tensor]) -> float:
        """Accuracy of a model on the made images; 0 without any."""
        if len(self._glfc.labels) == 0:
            return 0.0
        inputs = to_float(self._glfc.images, *self._glfc.constants).to(self._glfc.run.device)
        answers = self._glfc.run.load(arrays)(inputs).argmax(dim=1).cpu()
        return float((answers == self._glfc.labels).float().mean())

    def _last_round(self) -> int:
        experiment, tasks = self._glfc.run.experiment, range(1, self._stamp.task + 1)
        return sum(experiment.lead_rounds(task) + self._glfc.run.schedule.rounds[task - 1] for task in tasks)
