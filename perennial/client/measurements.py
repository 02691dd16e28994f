"""The measurements that a site reports beside its update, where a strategy asks for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perennial.client.policy import check_floor, exempt, withheld
from perennial.client.site import Site
from perennial.foundation.errors import PrivacyError
from perennial.learning.evaluation import by_head, count_correct
from perennial.learning.training import TrainingResult
from perennial.models.incremental import IncrementalModel
from perennial.protocol.measurements import (
    CLASS_COVERAGE,
    CLASSIFICATION_LOSS,
    HELD_OUT_ACCURACY,
    LABEL_COUNTS,
    TRAIN_ACCURACY,
    asked,
)
from perennial.protocol.messages import TrainRequest


def check_measurements(site: Site, request: TrainRequest) -> None:
    """Raises PrivacyError if measurements are asked for and no accountant covers them."""
    names = asked(request.settings)
    if names and site.experiment.privacy.enabled:
        raise PrivacyError(f"{', '.join(names)}: no accountant covers them; allowed without privacy")


def measured(
    site: Site, request: TrainRequest, model: IncrementalModel, indices: Tensor, result: TrainingResult
) -> dict[str, Any]:
    """The measurements that the request's settings ask for, by name.

    model: as trained. indices: of the samples that it was trained on. result: of that training. Raises
    ProtocolError on an unknown measurement, PolicyRefusal below the floor.
    """
    names = asked(request.settings)
    policy = site.identity.policy
    if names:
        check_floor(policy, "measurements", len(indices))

    def accuracy(of: Tensor) -> float | None:
        if len(of) < policy.min_samples and not exempt(policy, "measurements"):
            return None
        model.eval()
        with site.measuring():
            correct, total = count_correct(by_head(model), site.samples(of), request.num_classes)
        return sum(correct) / sum(total) if sum(total) else None

    def cells() -> list[int]:
        return site.data.y[indices].bincount(minlength=request.num_classes).tolist()

    def coverage() -> float:
        found = cells()
        stay = withheld(policy, "measurements", found)
        held = torch.tensor([n > 0 and label not in stay for label, n in enumerate(found)])
        return float(held.float().mean())

    def counts() -> list[int | None]:
        found = cells()
        stay = withheld(policy, "measurements", found)
        return [None if label in stay else n for label, n in enumerate(found)]

    measure: dict[str, Callable[[], Any]] = {
        HELD_OUT_ACCURACY: lambda: accuracy(site.data.task_indices("validation", 0, request.num_classes)),
        TRAIN_ACCURACY: lambda: accuracy(indices),
        CLASSIFICATION_LOSS: lambda: result.classification,
        CLASS_COVERAGE: coverage,
        LABEL_COUNTS: counts,
    }
    found = {name: measure[name]() for name in names}
    return {name: value for name, value in found.items() if value is not None}
