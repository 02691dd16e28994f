"""Tries whether an experiment's strategy fits its model and data, before anything starts."""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from perennial.config.experiment import Experiment
from perennial.data.schedule import TaskSchedule
from perennial.learning.worth import Scores
from perennial.server.central_privacy import CentralPrivacy
from perennial.server.global_model import GlobalModel
from perennial.strategies.factory import build_strategy
from perennial.strategies.round.request import TaskStart
from perennial.strategies.round.run_context import Counts, RunContext


def dry_run(experiment: Experiment, schedule: TaskSchedule, model: GlobalModel, *, measured: bool) -> None:
    """Attach a strategy and begin task 1 with it as a run would, and throw it away.

    model: as before task 1; its arrays stay as they are. measured: whether the server
    has test samples. Raises ConfigError or PrivacyError with the strategy's own reason.
    """
    strategy = build_strategy(experiment.strategy.name, experiment.strategy.parameters)
    # noise at the server is prepared, and refused, as a run would
    CentralPrivacy.of(experiment.privacy, strategy, {}, experiment.seed)
    strategy.attach(
        RunContext(
            experiment=experiment,
            schedule=schedule,
            input_shape=model.input_shape,
            device=model.device,
            constants=model.constants,
            load=model.holding,
            measure=_nothing_measured if measured else None,
            judge=_nothing_judged if measured else None,
        )
    )
    classes = schedule.classes_of(1)
    strategy.begin_task(TaskStart(1, classes.stop, classes, model.arrays, ()))


def _nothing_measured(arrays: Mapping[str, Tensor]) -> Counts:
    return [], []


def _nothing_judged(arrays: Mapping[str, Tensor], samples: int) -> Scores:
    return Scores(0, np.zeros(0, np.int64), np.zeros(0, np.bool_), np.zeros(0))
