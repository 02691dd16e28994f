"""The simulated data of an experiment, read once per process and shared by its server and its sites."""

import os
from dataclasses import dataclass, field
from typing import TypeVar

from perennial.config.schema import ExperimentFields
from perennial.data.config import DataConfig
from perennial.data.federation import SimulatedFederation, build
from perennial.foundation.errors import ConfigError

Checked = TypeVar("Checked", bound=ExperimentFields)
DataKey = tuple[str, str | None, int]


@dataclass
class _Held:
    """What this process has read. files: path -> what was there, by `_as_it_is`. readings: a count."""

    built: dict[DataKey, SimulatedFederation] = field(default_factory=dict)
    files: dict[str, list[tuple[str, int, int]]] = field(default_factory=dict)
    readings: int = 0


_held = _Held()


def build_data_key(experiment: ExperimentFields, own: DataConfig | None = None) -> DataKey:
    """Key under which this process holds an experiment's data; it changes once they are forgotten.

    own: a site's own data in place of the experiment's. A digest has no paths, so the key has one.
    """
    return experiment.digest, (own or experiment.data).path, _held.readings


def load_simulated_federation(experiment: ExperimentFields) -> SimulatedFederation:
    """All sites' data and the central test set. Raises ConfigError or DataError naming a fault."""
    key = build_data_key(experiment)
    if key not in _held.built:
        _held.built.clear()
        path = experiment.data.path
        if path is not None:
            _held.files[path] = _as_it_is(path)
        _held.built[key] = build(experiment.data, experiment.tasks, experiment.seed)
    return _held.built[key]


def as_for(experiment: Checked, other: ExperimentFields) -> Checked:
    """Return `experiment`, and let it use the data that were read for `other`, which has the same ones."""
    if (known := _held.built.get(build_data_key(other))) is not None:
        _held.built[build_data_key(experiment)] = known
    return experiment


def forget_simulated() -> None:
    """Forget all data in memory, so that they are read anew when next needed."""
    _held.readings += 1
    _held.built.clear()
    _held.files.clear()


def forget_if_changed(experiment: ExperimentFields) -> None:
    """Forget all data in memory if the experiment's files have changed. Never call it within a run."""
    path = experiment.data.path
    if path in _held.files and _held.files[path] != _as_it_is(path):
        forget_simulated()


def _as_it_is(path: str) -> list[tuple[str, int, int]]:
    """Time of change and bytes of a file, or of every folder in a folder; [] where nothing is."""
    places = [folder for folder, *_ in os.walk(path)] or [path]
    found = ((place, os.stat(place)) for place in places if os.path.exists(place))
    return [(place, at.st_mtime_ns, at.st_size) for place, at in found]


def list_simulated_sites(experiment: ExperimentFields) -> tuple[str, ...]:
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
    return data.shares or load_simulated_federation(experiment).site_names
