"""The measurements that a site tells beside its update, where a strategy asks for them."""

from collections.abc import Callable

from torch import Tensor

from client.batches import TrainingSet
from client.evaluation import by_head, count_correct
from client.site import Site
from client.training import TrainingResult
from models.incremental import IncrementalModel
from protocol.measurements import (
    CLASS_COVERAGE,
    CLASSIFICATION_LOSS,
    HELD_OUT_ACCURACY,
    TRAIN_ACCURACY,
    asked,
)
from protocol.messages import TrainRequest


def tell(
    site: Site, request: TrainRequest, model: IncrementalModel, places: Tensor, result: TrainingResult
) -> dict[str, float]:
    """What request asks for. model: as trained. places: of the samples that it was trained on.

    Raises ProtocolError naming a measurement that there is not.
    """

    def accuracy(of: Tensor) -> float | None:
        model.eval()
        correct, total = count_correct(by_head(model), site.samples(of), request.num_classes)
        return sum(correct) / sum(total) if sum(total) else None

    def coverage() -> float:
        data: TrainingSet = site.samples(places)
        return float((data.counts(request.num_classes) > 0).float().mean())

    measure: dict[str, Callable[[], float | None]] = {
        HELD_OUT_ACCURACY: lambda: accuracy(site.data.task_indices("validation", 0, request.num_classes)),
        TRAIN_ACCURACY: lambda: accuracy(places),
        CLASSIFICATION_LOSS: lambda: result.classification,
        CLASS_COVERAGE: coverage,
    }
    told = {name: measure[name]() for name in asked(request.settings)}
    return {name: value for name, value in told.items() if value is not None}
