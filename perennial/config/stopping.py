"""Early stopping: when a task's training ends, and which round's model it keeps, by the sites' validation."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from perennial.foundation.block import Block

if TYPE_CHECKING:
    from perennial.config.experiment import Experiment


class StoppingConfig(Block):
    """After each round the sites count right answers on their validation samples; the best model is kept."""

    patience: int | None = Field(default=None, ge=1)
    """Rounds without a better model after which the task ends; None: all its rounds are run."""
    gain: float = Field(default=0.0, ge=0, lt=1)
    """A model is better if its measure is higher by more than this."""
    measure: Literal["balanced_accuracy", "accuracy"] = "balanced_accuracy"
    keep: Literal["best", "last"] = "best"
    """Whose model goes on when the task ends: that of the best round, or of the last one."""


def require_validation(experiment: "Experiment") -> None:
    """Raises ValueError where sites cannot tell after each round how good the model is."""
    if experiment.stopping is None:
        return
    if experiment.data.validation_fraction == 0:
        raise ValueError("stopping: needs validation samples; data.validation_fraction is 0")
    if not experiment.evaluation.federated:
        raise ValueError("stopping: sites count their validation samples; evaluation.federated is false")
    if experiment.privacy.enabled:
        raise ValueError(
            f"stopping: counts of every round would leave the sites, which no accountant covers under "
            f"privacy.mode {experiment.privacy.mode!r}; remove it"
        )
    name = experiment.strategy.name
    if not experiment.strategy.trains or experiment.strategy.asks.personal_layers:
        raise ValueError(
            f"stopping: strategy {name!r} has no global model that rounds make better; remove it"
        )
