"""The simulated data of an experiment, read once per process and shared by its server and its sites."""

from perennial.config.experiment import Experiment
from perennial.data.federation import SimulatedFederation, build
from perennial.foundation.errors import ConfigError

_built: dict[str, SimulatedFederation] = {}


def simulated_federation(experiment: Experiment) -> SimulatedFederation:
    """All sites' data and the central test set.

    Raises ConfigError or DataError naming what is wrong with them.
    """
    digest = experiment.digest
    if digest not in _built:
        _built.clear()
        _built[digest] = build(experiment.data, experiment.tasks, experiment.seed)
    return _built[digest]


def as_for(experiment: Experiment, other: Experiment) -> Experiment:
    """The experiment, whose data are those of the other one and are not read again."""
    if other.digest in _built:
        _built[experiment.digest] = _built[other.digest]
    return experiment


def forget_simulated() -> None:
    """Read the data anew when they are asked for next, because they may have changed."""
    _built.clear()


def simulated_site_names(experiment: Experiment) -> tuple[str, ...]:
    """Names of the simulated sites, in order; reads the data only where the data names them.

    Raises ConfigError where the experiment has no data of its own.
    """
    data = experiment.data
    if data.only_at_sites:
        raise ConfigError(
            f"data.path: missing; experiment {experiment.name} has no data of its own, because "
            f"deployed sites "
            "bring theirs. A run on one machine needs data: give a path, or --set data.path=PATH"
        )
    return data.shares or simulated_federation(experiment).site_names
