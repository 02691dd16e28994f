"""What the server lends a strategy that needs more than replies: the experiment, a model, a measure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from config.experiment import Experiment
from data.schedule import TaskSchedule
from models.incremental import IncrementalModel

Counts = tuple[list[int], list[int]]
"""(right answers, samples) of each class."""


@dataclass(frozen=True)
class Services:
    """schedule: tasks and their classes. input_shape: of one sample. device: where the server computes.

    constants: (mean, std) of inputs, where the server knows them.
    load: the server's model with given travelling arrays in it, in evaluation mode; one model serves all
    calls, so a strategy that trains takes a copy.
    measure: counts of given arrays on the server's held-out samples of the classes seen so far; None where
    the server has none.
    """

    experiment: Experiment
    schedule: TaskSchedule
    input_shape: tuple[int, ...]
    device: torch.device
    constants: tuple[Tensor, Tensor] | None
    load: Callable[[Mapping[str, Tensor]], IncrementalModel]
    measure: Callable[[Mapping[str, Tensor]], Counts] | None
