"""Where a run stands: its progress and its model, and what requests say of both."""

from dataclasses import dataclass, replace
from typing import Any

from perennial.config.experiment import Experiment
from perennial.data.registry import Registry
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import Tensors
from perennial.server.global_model import GlobalModel
from perennial.server.run_states import Progress
from perennial.strategies.round.outcome import RoundOutcome
from perennial.strategies.round.previous import PreviousModel


@dataclass
class Position:
    """What the tasks and the rounds of a run share; a checkpoint stores all of it that can change.

    previous: the complete model of the task before, without its holders, which progress lists.
    """

    experiment: Experiment
    registry: Registry
    progress: Progress
    model: GlobalModel
    previous: PreviousModel

    @property
    def in_pretraining(self) -> bool:
        """Whether the next round is one of pre-training."""
        return self.progress.round_in_task < self.experiment.lead_rounds(self.progress.task)

    def rounds(self, task: int) -> int:
        """Rounds that are planned for a task, with those of pre-training."""
        return self.experiment.lead_rounds(task) + self.registry.schedule.rounds[task - 1]

    def stamp(self, number: int) -> Stamp:
        """The stamp of requests of a round of the current task. number: of the round, from 1."""
        task = self.progress.task
        return Stamp(
            run=self.progress.run,
            experiment=self.experiment.digest,
            class_order=self.registry.order_hash,
            split_key=self.progress.split_key,
            task=task,
            round=number,
            num_classes=self.registry.schedule.num_classes(task),
        )

    def needed_previous(self) -> PreviousModel:
        """The model of the task before and who holds it; nothing if no site needs it."""
        if not self.experiment.needs_previous:
            return PreviousModel()
        return replace(self.previous, holders=frozenset(self.progress.holders))

    def asking(self, site: str) -> dict[str, Any]:
        """Fields of a request to a site after the latest round.

        The previous model is sent only to a site that does not hold it.
        """
        return {
            **self.stamp(self.progress.round).stamp_fields,
            "arrays": Tensors(self.model.arrays),
            **self.needed_previous().fields_of(site),
        }

    def apply_outcome(self, outcome: RoundOutcome) -> None:
        """Count a round that was aggregated and adopt its model; one that was not counts nothing.

        A site that trained holds the previous model; one that failed gets it again.
        """
        progress = self.progress
        failed = {site for site, _ in (*outcome.dropped, *outcome.refused)}
        progress.holders = sorted(({*progress.holders} | {*outcome.participants}) - failed)
        if outcome.arrays is not None:
            progress.aggregated()
            self.model.arrays = outcome.arrays
