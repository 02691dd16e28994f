"""The trackers that a run's setting `track` names, and the object that passes events on to them."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from perennial.config.experiment import Experiment
from perennial.foundation.errors import ConfigError, nearest

Listener = Callable[[dict[str, Any]], None]
TRACKERS = ("tensorboard", "mlflow")

log = logging.getLogger("perennial.tracking")


def tracker_names(said: str) -> list[str]:
    """The names in a run's setting `track`. Raises ConfigError for one that is unknown."""
    names = [name for part in said.split(",") if (name := part.strip())]
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(
                f"track: found {name!r}{nearest(name, TRACKERS)}, allowed {', '.join(TRACKERS)}"
            )
    return names


def trackers(names: str, folder: Path, experiment: Experiment, first_round: int) -> list[Listener]:
    """The writers that a run's setting `track` names, separated by commas.

    first_round: the next round of a run that goes on; 1 otherwise. Raises ConfigError for an unknown name,
    PerennialError naming the extra that is not installed.
    """
    found: list[Listener] = []
    for name in tracker_names(names):
        if name == "tensorboard":
            from perennial.server.tracking.tensorboard import TensorBoard

            found.append(TensorBoard(folder, first_round))
        else:
            from perennial.server.tracking.mlflow import MLflow

            found.append(MLflow(folder, experiment.name, _dotted(experiment.model_dump(mode="json"))))
    return found


class Listeners:
    """Passes each event on to several listeners. One that fails gets no more events; the run goes on."""

    def __init__(self, first: Listener | None, others: Sequence[Listener]) -> None:
        self._first, self._others = first, list(others)

    def __call__(self, event: dict[str, Any]) -> None:
        if self._first is not None:
            self._first(event)
        for tracker in list(self._others):
            try:
                tracker(event)
            # whatever a store raises, hours of training must not end with it
            except Exception as error:
                self._others.remove(tracker)
                log.warning("track: %s failed and gets no more events: %s", type(tracker).__name__, error)


def _dotted(content: Any, key: str = "") -> dict[str, str]:
    if not isinstance(content, dict) or not content:
        return {key: str(content)}
    parts = (_dotted(value, f"{key}.{name}".lstrip(".")) for name, value in content.items())
    return {name: value for part in parts for name, value in part.items()}
