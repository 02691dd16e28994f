"""The state of a run (its progress and its model), and the fields of requests that follow from it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from secrets import token_hex
from typing import Any, Self

from torch import Tensor

from perennial.config.experiment import Experiment
from perennial.data.schedule import Registry, TaskSchedule
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import Tensors
from perennial.server.checkpoint import load_previous, save_previous
from perennial.server.global_model import GlobalModel
from perennial.server.run_folder import RunFolder
from perennial.server.run_states import Progress
from perennial.strategies.round.outcome import RoundOutcome
from perennial.strategies.round.previous import PreviousModel


@dataclass
class Position:
    """The state that tasks and rounds of a run share; a checkpoint stores all of it that can change.

    previous: the complete model of the task before, without its holders, which progress lists.
    class_means: classify in place of the head after the latest task, if the server has them.
    """

    experiment: Experiment
    registry: Registry
    progress: Progress
    model: GlobalModel
    previous: PreviousModel
    class_means: Tensor | None = None

    @classmethod
    def of(cls, experiment: Experiment, registry: Registry, model: GlobalModel, folder: RunFolder) -> Self:
        """The state that the folder's checkpoint holds, or that of a beginning; brings `model` there too."""
        checkpoint = folder.checkpoint
        progress = checkpoint.progress if checkpoint else folder.first_progress()
        if experiment.data.only_at_sites and not progress.secret:
            progress.secret = token_hex(16)
        position = cls(experiment, registry, progress, model, PreviousModel())
        if checkpoint is None:
            return position
        position.class_means = checkpoint.class_means
        if progress.previous:
            position.previous = _kept(folder, progress.previous)
        previous = position.previous.read()
        if progress.round_in_task:
            model.restore(progress.task, checkpoint.arrays, previous)
        elif progress.task > registry.schedule.count and previous is not None:
            # nothing is left to do but to write down what there is
            model.stand_after(previous)
        return position

    @property
    def schedule(self) -> TaskSchedule:
        return self.registry.schedule

    @property
    def num_classes(self) -> int:
        """Number of classes seen so far, with those of the current task."""
        return self.schedule.num_classes(self.progress.task)

    @property
    def one_classifier(self) -> bool:
        """Whether all sites judge with the saved model's classifier, not each with its own class means."""
        return self.experiment.learner.classifier != "nearest_mean" or self.class_means is not None

    @property
    def in_pretraining(self) -> bool:
        """Whether the next round is one of pre-training."""
        return self.progress.round_in_task < self.experiment.lead_rounds(self.progress.task)

    def rounds(self, task: int) -> int:
        """Number of rounds planned for a task, those of pre-training included."""
        return self.experiment.lead_rounds(task) + self.schedule.rounds[task - 1]

    def stamp(self, number: int) -> Stamp:
        """The stamp of requests in round `number`, from 1, of the current task."""
        return Stamp(
            run=self.progress.run,
            experiment=self.experiment.digest,
            class_order=self.registry.order_hash,
            split_key=self.progress.split_key,
            task=self.progress.task,
            round=number,
            num_classes=self.num_classes,
        )

    def needed_previous(self) -> PreviousModel:
        """The model of the task before and its holders; an empty one if no site needs it."""
        if not self.experiment.needs_previous:
            return PreviousModel()
        return replace(self.previous, holders=frozenset(self.progress.holders))

    def asking(self, site: str) -> dict[str, Any]:
        """The fields, common to all kinds, of a request to `site` after the latest round.

        The previous model is sent only to a site that does not hold it.
        """
        return {
            **self.stamp(self.progress.round).stamp_fields,
            "arrays": Tensors(self.model.arrays),
            **self.needed_previous().fields_of(site),
        }

    def apply_outcome(self, outcome: RoundOutcome) -> None:
        """Adopt the model of an aggregated round and count it; a skipped round is not counted.

        A site that trained holds the previous model; one that failed gets it again.
        """
        progress = self.progress
        failed = {site for site, _ in (*outcome.dropped, *outcome.refused)}
        progress.holders = sorted(({*progress.holders} | {*outcome.participants}) - failed)
        if outcome.arrays is not None:
            progress.aggregated()
            self.model.arrays = outcome.arrays

    def task_learnt(
        self, sha256: str, arrays: Mapping[str, Tensor], holders: list[str], folder: RunFolder
    ) -> None:
        """Store the finished task's complete model, held by sites `holders`, and go on to the next task."""
        save_previous(folder.checkpoint_folder, sha256, arrays, self.progress.previous)
        self.previous = _kept(folder, sha256)
        self.progress.task_learnt(sha256, holders)


def _kept(folder: RunFolder, sha256: str) -> PreviousModel:
    return PreviousModel(sha256, partial(load_previous, folder.checkpoint_folder, sha256))
