"""A site's training in one round, by the learner that its experiment names and under its privacy mode."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from perennial.client.corrections import LocalCorrection
from perennial.client.data_free_distillation import open_data_free_distillation
from perennial.client.release import noise_source
from perennial.client.ring_turn import features_as_asked
from perennial.client.site import Site
from perennial.config.turn import Turn
from perennial.foundation.streams import stream
from perennial.learning.batches import TrainingSet
from perennial.learning.bayesian_estimate import NeighbourDistances
from perennial.learning.training import TrainingResult, train
from perennial.models.flat import FlatParameters
from perennial.models.incremental import IncrementalModel
from perennial.protocol.messages import TrainRequest

if TYPE_CHECKING:
    from perennial.learning.cohort_training import Member


@dataclass(frozen=True)
class LocalTraining:
    """Trains model, whose parameters are flat's, in place.

    teacher: frozen model of the task before, or None where no term needs it. turn: in a ring.
    neighbours: sees what one record more would have changed.
    """

    site: Site
    request: TrainRequest
    model: IncrementalModel
    flat: FlatParameters
    data: TrainingSet
    teacher: IncrementalModel | None
    correction: LocalCorrection
    turn: Turn | None
    neighbours: NeighbourDistances | None
    start: Mapping[str, Tensor]
    """What flat was loaded from."""

    def run(self) -> TrainingResult:
        """What training changed."""
        if self.site.experiment.privacy.mode == "sample":
            return self._by_private_steps()
        if self.neighbours is not None:
            self.neighbours.see_halves(self.data, self.flat, self.request.personal or [], self._by_epochs)
        return self._by_epochs(self.data, self._batches())

    def as_member(self, start: Tensor) -> "Member | None":
        """This training as a part of a cohort's, or None if it has no such form. start: (P,), as received.

        A ring's turn follows the one before it, DP-SGD clips samples and not batches, and an estimate trains
        on halves too.
        """
        if (
            self.turn is not None
            or self.neighbours is not None
            or self.site.experiment.privacy.mode == "sample"
        ):
            return None
        from perennial.learning.cohort_training import Member

        extra = open_data_free_distillation(self.site, self.request)
        return Member(self.data, start, self._batches(), self.correction.gradient, extra)

    def _batches(self) -> np.random.Generator:
        ring = [self.turn.sweep] if self.turn is not None and self.turn.segments > 1 else []
        return stream(self.site.experiment.seed, "batches", self.site.name, self.request.round, *ring)

    def _by_private_steps(self) -> TrainingResult:
        from perennial.learning.private_training import train_privately

        experiment = self.site.experiment
        return train_privately(
            experiment.learner,
            experiment.privacy,
            self.model,
            self.flat,
            self.data,
            noise_source(self.site, self.request.round),
            teacher=self.teacher,
            augmentation=experiment.data.augmentation,
            progress=self.request.progress,
            first_class=self.site.task_range(self.request).start,
            correction=self.correction.gradient,
            extra=open_data_free_distillation(self.site, self.request),
            neighbours=self.neighbours,
        )

    def _by_epochs(self, samples: TrainingSet, generator: np.random.Generator) -> TrainingResult:
        experiment, name = self.site.experiment, self.site.name
        with features_as_asked(self.turn, self.model, self.request, experiment.seed, name):
            return train(
                experiment.learner,
                self.model,
                self.flat,
                samples,
                generator,
                teacher=self.teacher,
                augmentation=experiment.data.augmentation,
                progress=self.request.progress,
                first_class=self.site.task_range(self.request).start,
                correction=self.correction.gradient,
                extra=open_data_free_distillation(self.site, self.request),
                steps=self.site.steps(),
                # a ring's turn may begin by relabelling what was received
                start=self.start if self.turn is None else None,
            )
