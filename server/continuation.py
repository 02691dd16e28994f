"""Continuing a finished run with new classes: the old order stays, the new classes follow it.

The result is an experiment that says everything by itself (class order, increments, rounds), so that every
site of every engine comes to the same registry from the file alone.
"""

from perennial.config.experiment import Experiment
from perennial.data.federation import build
from perennial.data.registry import Registry, build_registry
from perennial.foundation.errors import ConfigError


def registry_of(experiment: Experiment, earlier: Registry | None = None) -> Registry:
    """The experiment's registry; earlier stays its prefix."""
    data = experiment.data
    if data.only_at_sites:
        if data.classes is None:
            raise ConfigError(
                "data.classes: missing; a server without data needs the registry of class names"
            )
        return build_registry(data.classes, experiment.tasks, experiment.seed, earlier)
    return build(data, experiment.tasks, experiment.seed, earlier).registry


def continued(old: Experiment, new: Experiment) -> Experiment:
    """The new experiment with its class order and schedule written out, the old ones first.

    Raises ConfigError when the two do not fit.
    """
    registry = registry_of(new, registry_of(old))
    content = new.model_dump(mode="json") | {"tasks": registry.as_tasks().model_dump(mode="json")}
    return Experiment.model_validate(content)
