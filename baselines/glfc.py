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
from perennial.strategies.fedavg import FedAvg
from perennial.strategies.round.gate import Admitted, Rejected
from perennial.strategies.round.request import TaskStart
from perennial.strategies.round.services import Services
from perennial.strategies.round.site_settings import with_settings
from perennial.strategies.sums.parameters import prefixed, unprefixed


class Glfc(FedAvg):
    """FedAvg that ends a task with the best model of the task, judged by the made images.

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
    needs = "gradients of prototypes from the sites, and the server's model"
    serves_groups = False  # its choice is of one model, the old one of every site

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
        self._services: Services | None = None

    def attach(self, services: Services) -> None:
        """Raises ConfigError where inputs are no images or their scale is unknown."""
        super().attach(services)
        if len(services.input_shape) != 3 or services.constants is None:
            raise ConfigError("strategy glfc: makes images; allowed with images whose mean and std are known")
        self._services = services

    def begin_task(self, task: TaskStart) -> None:
        self.images, self.labels = torch.empty(0), torch.empty(0, dtype=torch.int64)
        self.best, self.best_score = {}, -1.0

    def requests(self, request: TrainRequest, sites: Sequence[str]) -> dict[str, TrainRequest]:
        order = {"noise": self.noise, "entropy_rise": self.entropy_rise}
        return dict.fromkeys(sites, with_settings(request, prototypes=order))

    def begin_round(self) -> None:
        super().begin_round()
        self._arrived: dict[str, dict[str, Tensor]] = {}

    def fold(self, reply: Admitted) -> None:
        gradients = unprefixed("prototypes", reply.method)
        if gradients:
            self._arrived[reply.site] = self._checked(gradients)
        super().fold(reply)

    def finish_round(self) -> dict[str, Tensor]:
        arrays = super().finish_round()
        if self._services is None or self._stamp is None:
            return arrays
        for site in sorted(self._arrived):
            self._reconstruct(self._arrived[site], site)
        score = self._score(arrays)
        if score >= self.best_score:
            self.best, self.best_score = {name: value.clone() for name, value in arrays.items()}, score
        self.outcome.details |= {
            "transitions": sorted(self._arrived),
            "images": len(self.labels),
            "accuracy_on_images": score,
        }
        return self.best if self._stamp.round == self._last_round() else arrays

    def state_dict(self) -> dict[str, Any]:
        made = {"images": self.images, "labels": self.labels}
        return {**prefixed("best", self.best), **prefixed("made", made), "score": self.best_score}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        made = unprefixed("made", state)
        self.images, self.labels = made["images"], made["labels"]
        self.best, self.best_score = unprefixed("best", state), float(state["score"])

    @property
    def _new_classes(self) -> range:
        assert self._services is not None and self._stamp is not None
        return self._services.schedule.classes_of(self._stamp.task)

    def _encoder(self) -> GradientEncoder:
        assert self._services is not None and self._stamp is not None
        return GradientEncoder(
            self._services.input_shape, self._stamp.num_classes, self._services.experiment.seed
        )

    def _checked(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Raises Rejected where a site sent anything but k gradients of the encoder."""
        if self._services is None or self._stamp is None:
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
        assert self._services is not None and self._stamp is not None
        encoder, shape = self._encoder(), self._services.input_shape
        size: tuple[int, int, int] = (shape[0], shape[1], shape[2])
        for place in range(len(gradients["head.bias"])):
            gradient = {name: value[place] for name, value in gradients.items()}
            # cross entropy lowers the bias of no class but the sample's own (Zhao et al. 2020)
            label = int(gradient["head.bias"].argmin())
            if label not in self._new_classes or int((self.labels == label).sum()) >= self.per_class:
                continue
            seed = torch_seed(
                stream(self._services.experiment.seed, "reconstruction", site, self._stamp.round, place)
            )
            made = invert_gradient(
                encoder,
                gradient,
                size,
                torch.Generator().manual_seed(seed),
                labels=torch.tensor([label]),
                steps=self.steps,
            )
            self.images = torch.cat([self.images.view(-1, *size), made.images])
            self.labels = torch.cat([self.labels, made.labels])

    @torch.no_grad()
    def _score(self, arrays: Mapping[str, Tensor]) -> float:
        """Accuracy of a model on the made images; 0 without any."""
        assert self._services is not None and self._services.constants is not None
        if len(self.labels) == 0:
            return 0.0
        inputs = to_float(self.images, *self._services.constants).to(self._services.device)
        answers = self._services.load(arrays)(inputs).argmax(dim=1).cpu()
        return float((answers == self.labels).float().mean())

    def _last_round(self) -> int:
        assert self._services is not None and self._stamp is not None
        experiment, tasks = self._services.experiment, range(1, self._stamp.task + 1)
        return sum(experiment.lead_rounds(task) + self._services.schedule.rounds[task - 1] for task in tasks)
